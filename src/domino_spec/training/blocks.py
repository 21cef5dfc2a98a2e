"""What a step works on: which anchors, which labels, what each label weighs.

All of it is decided on the CPU, in a thread, before the step begins: the device never waits to
learn how many labels there are.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from domino_spec.data import Batch, PackedBatches
from domino_spec.training.vocabulary import DrawnTokens, TokenDraw


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """One step's work. Label lists are padded to whole chunks with weights of zero."""

    tokens: Tensor  # [batch, n]
    positions: Tensor  # [batch, n]
    documents: Tensor  # [batch, n]
    anchors: Tensor  # [batch, anchors]: indices into the sequence, ascending
    slots: Tensor  # [labels]: index of the draft in [batch * anchors * depth]
    sources: Tensor  # [labels]: index in [batch * n] of the token before the label
    labels: Tensor  # [labels]: the token to predict
    drafts: Tensor  # [labels]: draft index, 0 for the first after the anchor
    weights: Tensor  # [labels]: exp(-draft / gamma), 0 for padding
    packed: bool
    """Whether any row holds more than one document."""
    conversations: int
    label_count: int
    total_weight: float
    supervised_tokens: int
    vocabulary: DrawnTokens | None = None
    """Of the loss's softmax; None means all tokens."""

    def to(self, device: torch.device) -> Blocks:
        """The same on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Blocks:
        """The same in memory that a GPU copies from while it computes."""
        return self._mapped(Tensor.pin_memory)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        mapped: dict[str, Any] = {n: change(v) for n, v in values.items() if isinstance(v, Tensor)}
        if self.vocabulary is not None:
            mapped["vocabulary"] = DrawnTokens(*map(change, self.vocabulary))
        return replace(self, **mapped)


def eligible(batch: Batch) -> Tensor:
    """Where a block may start: this token and the next are supervised, in one document."""
    here, following = batch.supervised[:, :-1], batch.supervised[:, 1:]
    same = batch.documents[:, :-1] == batch.documents[:, 1:]
    inside = here & following & same
    return torch.cat((inside, torch.zeros_like(inside[:, :1])), dim=1)  # [batch, n]


def sample_anchors(allowed: Tensor, count: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """`count` anchors a row, uniform without replacement, ascending, and which of them are real.

    A row with fewer places uses them all; the rest point at its start and are marked unreal.
    """
    count = min(count, allowed.shape[1])
    scores = noise.masked_fill(~allowed, -1.0)  # [batch, n], noise in [0, 1)
    best = scores.topk(count, dim=1)
    places = best.indices.masked_fill(best.values < 0, 0)
    real = best.values >= 0
    order = torch.where(real, places, allowed.shape[1]).argsort(dim=1, stable=True)
    return places.gather(1, order), real.gather(1, order)


def plan_blocks(
    batch: Batch,
    *,
    anchors: int,
    depth: int,
    gamma: float,
    noise: Tensor,
    chunk: int,
    known: Tensor | None = None,  # [vocabulary] bool: tokens the drafter can propose
    history: int = 0,  # tokens of its own document that an anchor needs before it
    draw: TokenDraw | None = None,
) -> Blocks:
    """Anchors and the weighted labels after them.

    Draft j of anchor a predicts token a + 1 + j. A label counts if it is an assistant token of
    the anchor's own document; it weighs exp(-j / gamma).
    """
    length = batch.tokens.shape[1]
    allowed = eligible(batch) & (batch.positions >= history)
    places, real = sample_anchors(allowed, anchors, noise)
    draft = torch.arange(depth)
    index = places.unsqueeze(-1) + 1 + draft  # [batch, anchors, depth]
    inside = index < length
    index = index.clamp(max=length - 1)
    flat = index.flatten(1)
    supervised = batch.supervised.gather(1, flat).view_as(index)
    document = batch.documents.gather(1, flat).view_as(index)
    own = batch.documents.gather(1, places).unsqueeze(-1)
    labels = batch.tokens.gather(1, flat).view_as(index)
    counts = real.unsqueeze(-1) & inside & supervised & (document == own)
    if known is not None:
        counts &= known[labels]
    vocabulary = None
    if draw is not None:  # the noise is the step's own, and so is what is drawn by it
        vocabulary = draw(labels[counts], int(noise[0, 0] * 2**24))
        counts &= torch.isin(labels, vocabulary.tokens)

    slots = counts.flatten().nonzero().squeeze(1)
    drafts = slots % depth
    row = slots // (depth * places.shape[1])
    label_index = row * length + index.flatten()[slots]
    weights = torch.exp(-drafts / gamma)
    tokens = labels.flatten()[slots]
    # A batch may hold no label at all; it is then one chunk that weighs nothing.
    padding = -len(slots) % chunk if len(slots) else chunk

    def padded(values: Tensor) -> Tensor:
        return torch.cat((values, values.new_zeros(padding)))

    return Blocks(
        tokens=batch.tokens,
        positions=batch.positions,
        documents=batch.documents,
        anchors=places,
        slots=padded(slots),
        sources=padded(label_index - 1),
        labels=padded(tokens),
        drafts=padded(drafts),
        weights=padded(weights),
        packed=bool((batch.documents.max(dim=1).values > 0).any()),
        conversations=batch.conversations,
        label_count=len(slots),
        total_weight=float(weights.double().sum()),
        supervised_tokens=int(batch.supervised.sum()),
        vocabulary=vocabulary,
    )


Plan = Callable[..., Blocks]
"""`plan_blocks` for one run: a batch and `noise` -> the step's blocks."""


@dataclass(frozen=True)
class Work:
    """What one step does, and where the data stand after it."""

    parts: list[Blocks]
    position: dict[str, Any]


def step_noise(seed: int, step: int, shape: tuple[int, int]) -> Tensor:
    """Random numbers that depend on nothing but these: a resumed run draws the same."""
    mixed = (seed * 1_000_003 + step) * 1_009
    generator = torch.Generator().manual_seed(mixed % (2**63))
    return torch.rand(shape, generator=generator)


class Feed:
    """An iterator over steps that works ahead."""

    def __init__(
        self,
        batches: PackedBatches,
        plan: Plan,
        *,
        first_step: int,
        last_step: int,
        parts: int,
        seed: int,
        pin: bool,
        ahead: int = 3,
    ) -> None:
        self._batches, self._plan = batches, plan
        self._steps = range(first_step, last_step)
        self._parts, self._seed, self._pin = parts, seed, pin
        self._queue: queue.Queue[Work | BaseException | None] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="feed")

    def __iter__(self) -> Iterator[Work]:
        self._thread.start()
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop working ahead."""
        self._closed.set()
        while not self._queue.empty():
            self._queue.get_nowait()

    def _work(self) -> None:
        try:
            for step in self._steps:
                self._put(Work(self._blocks(step), self._batches.state_dict()))
                if self._closed.is_set():
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Work | BaseException | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def _blocks(self, step: int) -> list[Blocks]:
        batches = self._batches
        count = batches.rows * batches.world
        # Drawn for the step as a whole: how it is divided into parts and processes is no matter.
        noise = step_noise(self._seed, step, (self._parts * count, batches.length))
        blocks = []
        for part in range(self._parts):
            first = part * count + batches.rank * batches.rows
            planned = self._plan(batches.next(), noise=noise[first : first + batches.rows])
            blocks.append(planned.pinned() if self._pin else planned)
        return blocks
