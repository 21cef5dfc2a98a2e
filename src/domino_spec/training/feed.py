"""Feeds steps: batches are read and planned in a thread while the device works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_spec.data import Batch, PackedBatches
from domino_spec.training.blocks import Blocks

Plan = Callable[[Batch, Tensor], Blocks]
"""A batch and its noise -> the step's blocks."""


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
            planned = self._plan(batches.next(), noise[first : first + batches.rows])
            blocks.append(planned.pinned() if self._pin else planned)
        return blocks
