"""What an engine drafts with, whatever it is: `draft.LeanDrafter`, or anything with these methods.

A source keeps its state in slots, as the target does, and is one function of device tensors: what
it does is captured in the graph of a cycle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from domino_spec.drafter import Drafter
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.draft import LeanDrafter, why_not_drafts
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import Draws
from domino_spec.errors import InputError


class SlotMemory(Protocol):
    """State in slots."""

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another."""

    def free(self) -> None:
        """No slots at all."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""


class Source(Protocol):
    """Drafts for rows in slots."""

    @property
    def taps(self) -> Sequence[int]:
        """Points of the target that it reads."""

    @property
    def cache(self) -> SlotMemory:
        """What it knows of the slots' tokens."""

    @property
    def facts(self) -> list[Any]:
        """Whatever changes what its drafts cost, as plain values."""

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""

    def twin(self, target: InferenceModel, *, slots: int, capacity: int) -> Self:
        """The same weights, for a twin of the target, with slots of its own."""

    def observe(self, taps: Tensor, tokens: Tensor, rows: AttentionMetadata) -> None:
        """Tokens [rows, count] that the target has read, and its states [rows * count, ...].

        They stand behind each row's start. Of a verified block all go in; what was not accepted is
        written over by the next one.
        """

    def propose(self, anchors: Tensor, rows: AttentionMetadata, depth: int, draws: Draws) -> Tensor:
        """Drafts [rows, depth] behind each row's anchor [rows]."""

    def chooser(
        self, anchors: Tensor, rows: AttentionMetadata, depth: int
    ) -> Callable[[Draws], Any]:
        """What of proposing depends on how rows choose, over states that are there already."""


class SourceMaker(Protocol):
    """A source that an engine can be given in place of a block drafter."""

    @property
    def default_depth(self) -> int:
        """Drafts a cycle where nobody says."""

    @property
    def most_drafts(self) -> int | None:
        """None where there is no end."""

    @property
    def reach(self) -> int:
        """Places behind a row's anchor that drafting writes to, beside its drafts' own."""

    def why_not(self, device: torch.device) -> str | None:
        """What keeps it off an engine there, in words; None if nothing does."""

    def lean(self, target: InferenceModel, *, slots: int, capacity: int, pack: bool) -> Source:
        """The source itself, over a target's weights."""


AnySource = Drafter | SourceMaker
"""What an engine can be given to draft with."""


class BlockSource:
    """A block drafter: Domino, DFlash or Markov."""

    def __init__(self, drafter: Drafter, candidates: int | None = None) -> None:
        self._drafter, self._candidates = drafter, candidates
        self.default_depth = drafter.config.default_depth
        self.most_drafts: int | None = drafter.config.max_depth
        self.reach = drafter.config.block_size

    def why_not(self, device: torch.device) -> str | None:
        """Heads that the kernels do not take."""
        return why_not_drafts(self._drafter.config, device)

    def lean(self, target: InferenceModel, *, slots: int, capacity: int, pack: bool) -> LeanDrafter:
        """The lean drafter."""
        return LeanDrafter(
            self._drafter,
            target,
            slots=slots,
            capacity=capacity,
            candidates=self._candidates,
            pack=pack,
        )


def as_maker(drafter: AnySource, candidates: int | None = None) -> SourceMaker:
    """Whatever it is, as what makes a source."""
    if isinstance(drafter, Drafter):
        return BlockSource(drafter, candidates)
    if candidates is not None:
        raise InputError("candidates are block drafters'; this one has none to choose among.")
    return drafter


class OwnSlots(SlotMemory, Protocol):
    """State in slots that may have others."""

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots."""

    def twin(self) -> Self:
        """Of the same shape; to be resized before use."""


Memory = TypeVar("Memory", bound=OwnSlots)


class InSlots(Generic[Memory]):
    """A source all of whose state lies in slots; a twin shares the rest."""

    cache: Memory

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots of another size."""
        self.cache.resize(slots=slots, capacity=capacity)

    def twin(self, target: InferenceModel, *, slots: int, capacity: int) -> Self:  # noqa: ARG002
        """The same weights with slots of its own."""
        other = copy.copy(self)
        other.cache = self.cache.twin()
        other.resize(slots=slots, capacity=capacity)
        return other


class SlotStates:
    """Numbers of every token in slots, [slots, capacity, ...]: what a token left behind."""

    def __init__(
        self,
        *shape: int,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._states = torch.empty(0, dtype=dtype, device=device)
        self.resize(slots=slots, capacity=capacity)

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots; the old ones' memory is given back first."""
        self.capacity = capacity
        self.free()
        self._states = self._states.new_zeros((slots, capacity, *self._shape))

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        self._states = self._states.new_empty(0)

    def twin(self) -> Self:
        """Of the same shape; to be resized before use."""
        return copy.copy(self)

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another."""
        self._states[goal, :count] = self._states[source, :count]

    def write(self, states: Tensor, rows: AttentionMetadata) -> None:
        """Of each row's new tokens [rows, count, ...], behind its start."""
        self._states[rows.slots.unsqueeze(1), self.places(rows.starts, rows.count)] = states

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """Of some places [rows, n] of each slot [rows]: [rows, n, ...]."""
        return self._states[slots.unsqueeze(1), places]

    def places(self, starts: Tensor, count: int) -> Tensor:
        """So many places from each start on, [rows, count].

        Rows that only fill up a batch run past the end of their slot; theirs is the last place.
        """
        steps = torch.arange(count, device=starts.device)
        return (starts.unsqueeze(1) + steps).clamp(max=self.capacity - 1)

    def of(self, slots: Tensor) -> Tensor:
        """All places of some slots, [rows, capacity, ...]."""
        return self._states[slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._states.nbytes
