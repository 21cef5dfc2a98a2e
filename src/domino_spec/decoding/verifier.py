"""What the loop asks of whoever verifies its drafts: a forward over rows, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from domino_spec.targets import TargetOutput


class RowCache(Protocol):
    """What a verifier remembers of rows that decode together."""

    def commit(self, counts: Sequence[int], /) -> None:
        """Keep the first `counts[row]` of the positions the last forward appended."""

    def select(self, rows: Sequence[int], /) -> None:
        """Only these rows go on, in this order."""


CacheT = TypeVar("CacheT", bound=RowCache)


class Verifier(Protocol[CacheT]):
    """A target, through whichever forward: Transformers' own (`targets.Target`) or a faster one."""

    @property
    def device(self) -> torch.device:
        """Where logits and taps are."""

    def new_cache(self, rows: int) -> CacheT:
        """An empty cache for a run of so many rows."""

    def forward(
        self,
        tokens: Tensor,  # [rows, n]
        cache: CacheT,
        *,
        taps: Sequence[int] = (),
        keep: Sequence[int] | None = None,
        last_positions: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Run tokens behind each row's; the caller commits what it keeps.

        Where a prompt is read, `keep` is each row's last position, behind which it is padded. A
        column of logits stands for each different one, in order; of a row only its own is looked
        at. None gives logits of all positions. Tokens behind a row's entry in `last_positions` will
        be thrown away and must not reach past the model's context.
        """
