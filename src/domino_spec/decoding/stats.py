"""What a run did: cycles, acceptance by position, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

MIN_TOKENS_PER_CYCLE = 1.15
CYCLES_BEFORE_JUDGING = 50


@dataclass
class RowStats:
    """Counts of one sequence. The prefill's token is in no cycle."""

    cycles: int = 0
    committed: int = 0
    """Tokens committed in cycles."""
    offered: list[int] = field(default_factory=list)
    """How often a draft was verified at each position."""
    accepted: list[int] = field(default_factory=list)
    """How often it was accepted there."""

    def record(self, *, drafts: int, accepted: int, committed: int) -> None:
        """Count one cycle."""
        self.cycles += 1
        self.committed += committed
        while len(self.offered) < drafts:
            self.offered.append(0)
            self.accepted.append(0)
        for position in range(drafts):
            self.offered[position] += 1
            self.accepted[position] += position < accepted

    @property
    def tokens_per_cycle(self) -> float:
        """Committed tokens a cycle; 1.0 is what plain decoding gives."""
        return self.committed / self.cycles if self.cycles else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verified drafts accepted at each position."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    def add(self, other: RowStats) -> None:
        """Fold another row's counts into these."""
        self.cycles += other.cycles
        self.committed += other.committed
        width = max(len(self.offered), len(other.offered))
        for mine, theirs in ((self.offered, other.offered), (self.accepted, other.accepted)):
            mine.extend([0] * (width - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            **asdict(self),
            "tokens_per_cycle": self.tokens_per_cycle,
            "acceptance_by_position": self.acceptance_by_position,
        }


@dataclass
class RunStats:
    """One run over a batch: all rows' counts and the wall time of each stage."""

    rows: RowStats = field(default_factory=RowStats)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Everything, from the prompt to the last token."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def tokens_per_cycle(self) -> float:
        """Over all rows."""
        return self.rows.tokens_per_cycle

    @property
    def useless(self) -> bool:
        """Whether enough cycles have shown that the drafter does not help at all."""
        return (
            self.rows.cycles >= CYCLES_BEFORE_JUDGING
            and bool(self.rows.offered)
            and self.tokens_per_cycle < MIN_TOKENS_PER_CYCLE
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            **self.rows.to_dict(),
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
        }


class Stopwatch:
    """Adds wall time to the stages of a run, waiting for the device at each boundary."""

    def __init__(self, stats: RunStats, device: torch.device) -> None:
        self._stats = stats
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside as `name`."""
        start = self._now()
        try:
            yield
        finally:
            field_name = f"{name}_seconds"
            spent = self._now() - start
            setattr(self._stats, field_name, getattr(self._stats, field_name) + spent)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
