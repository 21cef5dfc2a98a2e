"""What the engine knows of each slot, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.fast.penalties import Penalties
from domino_spec.fast.sampling import Draws


class Slots:
    """One entry a slot, and one more for rows that only fill up a batch.

    `lengths[s]` tokens of slot s are in the target's cache and in the drafter's context; the anchor
    is committed but in neither.
    """

    def __init__(self, count: int, vocabulary: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count + 1, dtype=dtype, device=device)

        self.count = count
        self.device = device
        self._vocabulary = vocabulary
        self._penalties: Penalties | None = None
        self.lengths = column(torch.long)
        self.anchors = column(torch.long)
        self.seeds = column(torch.long)
        self.temperature = column(torch.float32)
        self.top_k = column(torch.long)
        self.top_p = column(torch.float64)  # 1 - top_p is rounded once, as Transformers does
        self.min_p = column(torch.float32)

    @property
    def spare(self) -> int:
        """The slot of rows that nobody asked for."""
        return self.count

    @property
    def penalties(self) -> Penalties:
        """Made when some row first has one: a number a slot and token is much to keep for none."""
        if self._penalties is None:
            self._penalties = Penalties(self.count + 1, self._vocabulary, self.device)
        return self._penalties

    def open(
        self, slot: int, *, prompt: Sequence[int], anchor: int, params: SamplingParams, seed: int
    ) -> None:
        """A row begins here: its prompt is in the caches, the anchor comes behind it."""
        self.lengths[slot] = len(prompt)
        self.anchors[slot] = anchor
        self.seeds[slot] = seed
        self.temperature[slot] = float(params.temperature)
        self.top_k[slot] = params.top_k
        self.top_p[slot] = float(params.top_p)
        self.min_p[slot] = float(params.min_p)
        if params.penalises or self._penalties is not None:
            self.penalties.open(slot, prompt, params)

    @contextmanager
    def choosing(self, params: SamplingParams) -> Iterator[None]:
        """Rows that choose so seem to be in all slots; for measurements, and undone afterwards."""
        columns = [value for value in vars(self).values() if isinstance(value, Tensor)]
        before, penalties = [column.clone() for column in columns], self._penalties
        self._penalties = None  # the true one stays as it is
        try:
            for slot in range(self.count):
                self.open(slot, prompt=[0], anchor=0, params=params, seed=slot)
            yield
        finally:
            self._penalties = penalties
            for column, values in zip(columns, before, strict=True):
                column.copy_(values)

    def draws(self, slots: Tensor, *, sampled: bool, filtered: bool) -> Draws:
        """How these slots' rows choose, with no more work than some row of them needs."""
        if not sampled:
            return Draws()
        cut = (
            {"top_k": self.top_k[slots], "top_p": self.top_p[slots], "min_p": self.min_p[slots]}
            if filtered
            else {}
        )
        return Draws(temperature=self.temperature[slots], seeds=self.seeds[slots], **cut)
