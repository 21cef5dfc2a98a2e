"""How prompts get into the caches: several in one forward, on a GPU captured for a few shapes.

Of a prompt's forward through a small model, nearly all is the host launching kernels. So prompts of
similar lengths are padded to one length and computed together. A prompt alone is padded on a GPU to
one of a few lengths, each captured in a CUDA graph once. Padding comes after a prompt: no token of
it sees that, and whatever comes next is written over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.graphs import Recorder
from domino_spec.engine.kernels.attention import MAX_TOKENS
from domino_spec.engine.kernels.linear import normed
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sources import Source

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Prompts are padded to one of these; longer ones keep the GPU busy by themselves."""
_LONGEST = 4096
"""Forwards that see more are not captured: what their attention needs would stay taken for good."""
_CHEAP = 2048
"""Tokens of a forward that a GPU computes in less time than its kernels take to launch."""
_PADDING = 0.7
"""Prompts share a forward if each is at least so long, compared with the longest of them."""


@dataclass(frozen=True)
class Part:
    """Tokens of a prompt, and where they go."""

    slot: int
    start: int
    """Tokens of the slot that are there already."""
    tokens: Sequence[int]


@dataclass(frozen=True)
class Shape:
    """What a prefill forward looks like; each is captured once."""

    rows: int
    count: int
    """Tokens a prompt, padding included."""
    longest: int | None
    """A bound on what a slot holds then; None where attention needs none."""
    observed: bool
    """Whether the drafter's cache is updated too."""
    common: bool = True
    """Whether the shape will come again: worth a graph."""


@dataclass(frozen=True)
class Captured:
    """A graph with the tensors it reads and writes."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor  # see `_numbers`
    last: Tensor  # [rows, hidden]


class Prefill:
    """Computes prompts' keys and values: the target's, and its drafter's."""

    def __init__(
        self,
        target: InferenceModel,
        drafter: Source | None,
        *,
        spare: int,
        recorder: Recorder | None,
        pad: bool | None = None,
    ) -> None:
        """With a recorder forwards are captured; `pad` alone only pads, which tests want."""
        self._target, self._drafter = target, drafter
        self._spare = spare
        self._recorder = recorder
        self._pad = recorder is not None if pad is None else pad
        self._cheap = _CHEAP if target.device.type == "cuda" else 0
        self._captured: dict[Shape, Captured] = {}
        self._seen: Counter[Shape] = Counter()
        self._too_large: set[Shape] = set()

    def copy(self, source: int, slot: int, count: int, *, observed: bool) -> None:
        """The first tokens of one slot into another."""
        self._target.cache.copy(source, slot, count)
        if observed and self._drafter is not None:
            self._drafter.cache.copy(source, slot, count)

    @torch.no_grad()
    def run(self, parts: Sequence[Part], *, observed: bool) -> Tensor:
        """The states of each part's last token, [parts, hidden], before the last norm."""
        found: list[Tensor | None] = [None] * len(parts)
        with on_device(self._target.device):
            for group in self._groups(parts):
                states = self._together([parts[i] for i in group], observed=observed)
                if len(group) == len(parts):
                    order = torch.tensor(group).argsort().to(states.device)
                    return states[order] if len(group) > 1 else states
                for place, index in enumerate(group):
                    found[index] = states[place].clone()  # the next replay writes over it
            return torch.stack([each for each in found if each is not None])

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocabulary]."""
        target = self._target
        return target.logits(normed(states, target.norm, target.shape.eps))

    @torch.no_grad()
    def capture(self, *, observed: bool) -> None:
        """Capture every length that one prompt in an empty slot may be padded to."""
        if self._recorder is None:
            return
        with on_device(self._target.device):
            for length in reversed(LENGTHS):  # smaller ones fit into what the largest took
                if length <= self._target.cache.capacity:
                    shape = self._shape(1, length, 0, observed=observed)
                    if shape not in self._captured:
                        self._capture(shape, self._recorder)

    def _groups(self, parts: Sequence[Part]) -> list[list[int]]:
        """Parts that share a forward: of similar lengths, and none reaching past its slot."""
        capacity = self._target.cache.capacity
        order = sorted(range(len(parts)), key=lambda i: -len(parts[i].tokens))
        groups: list[list[int]] = []
        for index in order:
            part = parts[index]
            if groups:
                longest = len(parts[groups[-1][0]].tokens)
                padded = (len(groups[-1]) + 1) * longest
                similar = len(part.tokens) >= _PADDING * longest or padded <= self._cheap
                if similar and part.start + longest <= capacity:
                    groups[-1].append(index)
                    continue
            groups.append([index])
        return groups

    def _together(self, parts: Sequence[Part], *, observed: bool) -> Tensor:
        count = max(len(part.tokens) for part in parts)
        start = max(part.start for part in parts)
        return self.forward(parts, self._shape(len(parts), count, start, observed=observed))

    @torch.no_grad()
    def forward(self, parts: Sequence[Part], shape: Shape) -> Tensor:
        """One forward of these parts in a shape that holds them: [parts, hidden]."""
        numbers = torch.tensor(_numbers(parts, shape, self._spare))
        captured = self._captured.get(shape) or self._worth_capturing(shape)
        if captured is None:
            return self._forward(shape, numbers.to(self._target.device))[: len(parts)]
        captured.numbers.copy_(numbers.pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.last[: len(parts)]

    def _shape(self, rows: int, count: int, start: int, *, observed: bool) -> Shape:
        """The shape in which so many prompts of so many tokens are computed."""
        capacity = self._target.cache.capacity
        observed = observed and self._drafter is not None
        exact = Shape(rows, count, start + count, observed, common=False)
        length = next((n for n in LENGTHS if n >= count), None)
        if not self._pad or length is None or start + length > capacity:
            return exact
        if rows > 1:  # so many shapes that capturing them would hold requests up
            return exact
        if length <= MAX_TOKENS:
            return Shape(1, length, None, observed)
        # After other tokens a few bounds, so that a few graphs serve all starts.
        bound = min(1 << (start + length - 1).bit_length(), capacity) if start else length
        if bound > _LONGEST:
            return exact
        return Shape(1, length, bound, observed)

    def _worth_capturing(self, shape: Shape) -> Captured | None:
        """A graph for a shape that comes for the second time; capturing takes three forwards."""
        if self._recorder is None or not shape.common or shape in self._too_large:
            return None
        self._seen[shape] += 1
        if self._seen[shape] < 2:
            return None
        try:
            return self._capture(shape, self._recorder)
        except torch.OutOfMemoryError:  # it can be computed all the same, now and from now on
            self._too_large.add(shape)
            return None

    def _forward(self, shape: Shape, numbers: Tensor) -> Tensor:
        """On a GPU nothing in here waits for the host."""
        even = shape.rows + shape.rows % 2
        slots, starts, last = (numbers[i * even : i * even + shape.rows] for i in range(3))
        tokens = numbers[3 * even :].view(shape.rows, shape.count)
        rows = AttentionMetadata(slots, starts, shape.count, longest=shape.longest)
        observer = self._drafter if shape.observed else None
        taps = () if observer is None else observer.taps
        states, tapped = self._target.forward(tokens, rows, taps)
        if observer is not None:
            observer.observe(tapped, tokens, rows)
        return states.rows.index_select(0, last)

    def _capture(self, shape: Shape, recorder: Recorder) -> Captured:
        """Capture one forward of this shape in the spare slot; slots in use are not touched."""
        numbers = torch.tensor(_numbers([], shape, self._spare), device=self._target.device)
        graph, last = recorder.record(lambda: self._forward(shape, numbers))
        self._captured[shape] = Captured(graph, numbers, last)
        return self._captured[shape]


def _numbers(parts: Sequence[Part], shape: Shape, spare: int) -> list[int]:
    """All that a forward reads: slots, starts, where each part ends, tokens.

    Each is aligned to 16 bytes, as kernels are compiled for. Prompts that only fill up the shape
    lie in the spare slot.
    """
    odd = [0] * (shape.rows % 2)
    more = shape.rows - len(parts)
    slots = [*(part.slot for part in parts), *[spare] * more, *odd]
    starts = [*(part.start for part in parts), *[0] * more, *odd]
    ends = [*(len(part.tokens) for part in parts), *[1] * more]
    last = [row * shape.count + end - 1 for row, end in enumerate(ends)] + odd
    tokens: list[int] = []
    for part in parts:
        # Padded with a token of its own: any number is finite where its own are.
        tokens += [*part.tokens, *[part.tokens[-1]] * (shape.count - len(part.tokens))]
    return [*slots, *starts, *last, *tokens, *[0] * (more * shape.count)]
