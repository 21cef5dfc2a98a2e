"""How prompts are read into slots: on a GPU by forwards that are captured for a few lengths.

Of a prompt's forward through a small model, nearly all is the host starting kernels. So a part of a
prompt is filled up to one of a few lengths, each captured in a CUDA graph once. What fills it up
lies behind the part: no token of it sees that, and whatever comes next is written over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.fast.graphs import Recorder
from domino_spec.fast.kernels.attention import MAX_TOKENS
from domino_spec.fast.kernels.linear import normed
from domino_spec.fast.kernels.runtime import on_device
from domino_spec.fast.rows import Rows
from domino_spec.fast.sources import Source
from domino_spec.fast.target import LeanTarget

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Parts are filled up to one of these; longer ones keep the GPU busy by themselves."""
_LONGEST = 4096
"""Parts that see more are not captured: what their attention needs would stay taken for good."""


@dataclass(frozen=True)
class Part:
    """What a reading forward looks like; each kind is captured once."""

    count: int
    """Tokens, those that fill it up among them."""
    longest: int | None
    """A bound on what the slot holds then; None where attention needs none."""
    observed: bool
    """Whether the drafter is told of the tokens."""
    common: bool = True
    """Whether others will be of this kind too: worth a graph."""


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # see `_numbers`
    last: Tensor  # [1, hidden]


class PromptReader:
    """Reads parts of prompts into a target's slots, and into its drafter's."""

    def __init__(
        self,
        target: LeanTarget,
        drafter: Source | None,
        *,
        spare: int,
        recorder: Recorder | None,
        fill: bool | None = None,
    ) -> None:
        """With a recorder forwards are captured; `fill` alone only fills up, which tests want."""
        self._target, self._drafter = target, drafter
        self._spare = spare
        self._recorder = recorder
        self._fill = recorder is not None if fill is None else fill
        self._captured: dict[Part, Captured] = {}
        self._seen: Counter[Part] = Counter()
        self._too_large: set[Part] = set()

    def copy(self, source: int, slot: int, count: int, *, observed: bool) -> None:
        """The first tokens of one slot into another."""
        self._target.cache.copy(source, slot, count)
        if observed and self._drafter is not None:
            self._drafter.cache.copy(source, slot, count)

    @torch.no_grad()
    def read(self, tokens: Sequence[int], *, slot: int, start: int, observed: bool) -> Tensor:
        """Read them behind a slot's first `start`; the last one's state [1, hidden].

        It may lie where the next read writes: use it before.
        """
        with on_device(self._target.device):
            count = len(tokens)
            part = self._filled(count, start, observed=observed)
            # Filled up with a token of its own: any number is finite where its own are.
            filled = [*tokens, *[tokens[-1]] * (part.count - count)]
            numbers = torch.tensor(_numbers(slot, start, count - 1, filled))
            captured = self._captured.get(part) or self._worth_capturing(part)
            if captured is None:
                return self._run(part, numbers.to(self._target.device))
            captured.numbers.copy_(numbers.pin_memory(), non_blocking=True)
            captured.graph.replay()
            return captured.last

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """[1, hidden] -> [1, vocabulary]."""
        target = self._target
        return target.logits(normed(last, target.norm, target.shape.eps))

    def prefill(self, tokens: Sequence[int], slot: int, *, chunk: int) -> Tensor:
        """Read a prompt into an empty slot, the target's alone; logits [vocabulary] of its end."""
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            last = self.read(part, slot=slot, start=start, observed=False)
        return self.logits(last)[0]

    @torch.no_grad()
    def capture(self, *, observed: bool) -> None:
        """Record every length that a prompt in an empty slot may be filled up to."""
        if self._recorder is None:
            return
        with on_device(self._target.device):
            for length in reversed(LENGTHS):  # smaller ones fit into what the largest took
                if length <= self._target.cache.capacity:
                    part = self._filled(length, 0, observed=observed)
                    if part not in self._captured:
                        self._capture(part, self._recorder)

    def _filled(self, count: int, start: int, *, observed: bool) -> Part:
        """The kind of forward that so many tokens are read by."""
        capacity = self._target.cache.capacity
        observed = observed and self._drafter is not None
        length = next((n for n in LENGTHS if n >= count), None)
        if not self._fill or length is None or start + length > capacity:
            return Part(count, start + count, observed, common=False)
        if length <= MAX_TOKENS:
            return Part(length, None, observed)
        # Behind other tokens a few bounds, so that a few graphs serve all starts.
        bound = min(1 << (start + length - 1).bit_length(), capacity) if start else length
        if bound > _LONGEST:
            return Part(count, start + count, observed, common=False)
        return Part(length, bound, observed)

    def _worth_capturing(self, part: Part) -> Captured | None:
        """A graph for a kind that comes for the second time; recording takes three forwards."""
        if self._recorder is None or not part.common or part in self._too_large:
            return None
        self._seen[part] += 1
        if self._seen[part] < 2:
            return None
        try:
            return self._capture(part, self._recorder)
        except torch.OutOfMemoryError:  # it can be read all the same, now and from now on
            self._too_large.add(part)
            return None

    def _run(self, part: Part, numbers: Tensor) -> Tensor:
        """On a GPU nothing in here waits for the host."""
        slot, start, last, tokens = numbers[:1], numbers[2:3], numbers[4:5], numbers[6:]
        rows = Rows(slot, start, part.count, longest=part.longest)
        observer = self._drafter if part.observed else None
        taps = () if observer is None else observer.taps
        tokens = tokens.unsqueeze(0)
        states, tapped = self._target.forward(tokens, rows, taps)
        if observer is not None:
            observer.observe(tapped, tokens, rows)
        return states.rows.index_select(0, last)

    def _capture(self, part: Part, recorder: Recorder) -> Captured:
        """Record one forward of this kind in the spare slot; rows in use are not touched."""
        numbers = torch.tensor(
            _numbers(self._spare, 0, part.count - 1, [0] * part.count), device=self._target.device
        )
        graph, last = recorder.record(lambda: self._run(part, numbers))
        self._captured[part] = Captured(graph, numbers, last)
        return self._captured[part]


def _numbers(slot: int, start: int, last: int, tokens: Sequence[int]) -> list[int]:
    """All that a forward reads. Each part is aligned to 16 bytes, as kernels are compiled for."""
    return [slot, 0, start, 0, last, 0, *tokens]
