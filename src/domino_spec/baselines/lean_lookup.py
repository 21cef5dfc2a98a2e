"""Prompt lookup on the engine: every slot's tokens on the device, all compared at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from domino_spec.baselines.lookup import DEFAULT_DEPTH, LONGEST_MATCH, PromptLookup
from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sampling import Draws
from domino_spec.engine.sources import InSlots, SlotStates


class LookupSource:
    """What an engine is given."""

    most_drafts = None
    reach = 0

    def __init__(self, *, depth: int = DEFAULT_DEPTH, longest: int = LONGEST_MATCH) -> None:
        PromptLookup(depth=depth, longest=longest)  # refuses what makes no sense
        self.default_depth = depth
        self.longest = longest

    def why_not(self, device: torch.device) -> str | None:  # noqa: ARG002
        """Nothing."""
        return None

    def lean(
        self,
        target: InferenceModel,
        *,
        slots: int,
        capacity: int,
        pack: bool,  # noqa: ARG002
    ) -> LeanLookup:
        """The source itself."""
        return LeanLookup(
            longest=self.longest, slots=slots, capacity=capacity, device=target.device
        )


class LeanLookup(InSlots[SlotStates]):
    """The continuation of the longest match, of the latest where it stands several times.

    A row that finds nothing, or less than others, is filled up with its anchor.
    """

    taps: Sequence[int] = ()

    def __init__(self, *, longest: int, slots: int, capacity: int, device: torch.device) -> None:
        self._longest = longest
        self.cache = SlotStates(slots=slots, capacity=capacity, dtype=torch.long, device=device)

    @property
    def facts(self) -> list[Any]:
        """Whatever changes what its drafts cost."""
        return ["lookup", self._longest, self.cache.capacity]

    def observe(self, taps: Tensor, tokens: Tensor, rows: AttentionMetadata) -> None:  # noqa: ARG002
        """The tokens themselves are enough."""
        self.cache.write(tokens, rows)

    def propose(self, anchors: Tensor, rows: AttentionMetadata, depth: int, draws: Draws) -> Tensor:  # noqa: ARG002
        """Up to `depth` tokens that stood behind the same few tokens before."""
        self.cache.write(anchors.unsqueeze(1), AttentionMetadata(rows.slots, rows.starts, 1))
        text = self.cache.of(rows.slots)  # [rows, capacity]
        last = self.cache.places(rows.starts, 1)
        found = self._behind_match(text, last)
        places = found + torch.arange(depth, device=text.device)  # [rows, depth]
        drafts = text.gather(1, places.clamp(max=text.shape[1] - 1))
        known = (found > 0) & (places <= last)
        return torch.where(known, drafts, anchors.unsqueeze(1))

    def chooser(
        self,
        anchors: Tensor,
        rows: AttentionMetadata,  # noqa: ARG002
        depth: int,  # noqa: ARG002
    ) -> Callable[[Draws], Tensor]:
        """Nothing is drawn; but an empty graph cannot be recorded."""
        return lambda _draws: anchors.clone()

    def _behind_match(self, text: Tensor, last: Tensor) -> Tensor:
        """The place behind the latest of the longest matches of each text's end; 0 without one.

        A match is of the tokens up to `last`, [rows, 1], and ends before it.
        """
        places = torch.arange(text.shape[1], device=text.device)  # behind how many tokens
        same = (places > 0) & (places <= last)
        best = torch.zeros_like(last)
        for length in range(1, self._longest + 1):
            own = text.gather(1, (last - length + 1).clamp(min=0))
            same = same & (places >= length) & (last + 1 >= length)
            same = same & (text.roll(length, dims=1) == own)
            longer = torch.where(same, places, 0).amax(dim=1, keepdim=True)
            best = torch.where(longer > 0, longer, best)
        return best
