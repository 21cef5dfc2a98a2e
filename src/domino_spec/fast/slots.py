"""What the engine knows of each slot, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.fast.sampling import Draws


class Slots:
    """One entry a slot, and one more for rows that only fill up a batch.

    `lengths[s]` tokens of slot s are in the target's cache and in the drafter's context; the anchor
    is committed but in neither.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count + 1, dtype=dtype, device=device)

        self.count = count
        self.device = device
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

    def open(
        self, slot: int, *, length: int, anchor: int, params: SamplingParams, seed: int
    ) -> None:
        """A row begins here: `length` tokens are in the caches, the anchor comes behind them."""
        self.lengths[slot] = length
        self.anchors[slot] = anchor
        self.seeds[slot] = seed
        self.temperature[slot] = float(params.temperature)
        self.top_k[slot] = params.top_k
        self.top_p[slot] = float(params.top_p)
        self.min_p[slot] = float(params.min_p)

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
