"""Who sits in the slots, and which cycles are under way for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from domino_spec.decoding import Row, RunStats, SamplingParams


@dataclass
class Seat:
    """A row in its slot."""

    slot: int
    row: Row
    params: SamplingParams
    run: RunStats | None = None
    """Where its cycles are counted, besides the row's own counts."""
    cycles: int = 0
    left: bool = False
    """Whether the row has gone; a cycle started before may still report on it."""


@dataclass(frozen=True)
class Flight:
    """A cycle that was started: for whom, and its report to come."""

    seats: tuple[Seat, ...]
    depth: int
    report: Callable[[], Tensor]
