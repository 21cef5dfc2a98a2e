"""What the engine knows of each slot, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.engine.penalties import Penalties
from domino_spec.engine.sampling import Draws


class Slots:
    """One entry a slot, and one more for those that only fill up a batch.

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
        """The slot of those that only fill up a batch."""
        return self.count

    @property
    def penalties(self) -> Penalties:
        """Made when a sequence first has one: a number for each slot and token takes memory."""
        if self._penalties is None:
            self._penalties = Penalties(self.count + 1, self._vocabulary, self.device)
        return self._penalties

    def open(
        self,
        slots: Sequence[int],
        *,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
    ) -> Tensor:
        """Sequences begin here: their prompts are in the caches, the anchors are to come.

        Gives the slots as a tensor [n]. Nothing waits for the device.
        """
        whole = [
            [slot, len(prompt), seed, each.top_k]
            for slot, prompt, each, seed in zip(slots, prompts, params, seeds, strict=True)
        ]
        parts = [[float(p.temperature), float(p.top_p), float(p.min_p)] for p in params]
        places, lengths, seed, top_k = self.send(torch.tensor(whole)).unbind(1)
        temperature, top_p, min_p = self.send(torch.tensor(parts, dtype=torch.float64)).unbind(1)
        self.lengths[places] = lengths
        self.seeds[places] = seed
        self.top_k[places] = top_k
        self.temperature[places] = temperature.to(torch.float32)
        self.top_p[places] = top_p
        self.min_p[places] = min_p.to(torch.float32)
        if self._penalties is not None or any(each.penalises for each in params):
            for slot, prompt, each in zip(slots, prompts, params, strict=True):
                self.penalties.open(slot, prompt, each)
        return places

    def send(self, values: Tensor) -> Tensor:
        """Numbers of the host on the device, which is not waited for."""
        if self.device.type == "cuda":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values.to(self.device)

    @contextmanager
    def choosing(self, params: SamplingParams) -> Iterator[None]:
        """As if all slots held sequences that choose so; for measurements, undone afterwards."""
        columns = [value for value in vars(self).values() if isinstance(value, Tensor)]
        before, penalties = [column.clone() for column in columns], self._penalties
        self._penalties = None  # the true one stays as it is
        try:
            every = list(range(self.count))
            prompts, chosen = [[0]] * self.count, [params] * self.count
            self.open(every, prompts=prompts, params=chosen, seeds=every)
            yield
        finally:
            self._penalties = penalties
            for column, values in zip(columns, before, strict=True):
                column.copy_(values)

    def draws(self, slots: Tensor, *, sampled: bool, filtered: bool) -> Draws:
        """How these slots' sequences choose, with no more work than some of them needs."""
        if not sampled:
            return Draws()
        cut = (
            {"top_k": self.top_k[slots], "top_p": self.top_p[slots], "min_p": self.min_p[slots]}
            if filtered
            else {}
        )
        return Draws(temperature=self.temperature[slots], seeds=self.seeds[slots], **cut)
