"""What a run did: cycles, acceptance by position, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

MIN_TOKENS_PER_CYCLE = 1.15
CYCLES_BEFORE_JUDGING = 50
DRAFTED_BEFORE_JUDGING = 12
"""Of these cycles, how many must have verified drafts where not all of them do."""

Loop = Literal["reference", "fast", "both"]


@dataclass
class AcceptanceStats:
    """Acceptance of a sequence, or summed over several; the prefill's token is in no cycle."""

    cycles: int = 0
    committed: int = 0
    """Tokens committed in cycles."""
    offered: list[int] = field(default_factory=list)
    """How often a draft was verified at each position."""
    accepted: list[int] = field(default_factory=list)
    """How often it was accepted there."""
    ranks: list[int] = field(default_factory=list)
    """Accepted drafts by rank: the best child of the token before, the second best, ..."""

    def record(
        self, *, drafts: int, accepted: int, committed: int, ranks: Sequence[int] | None = None
    ) -> None:
        """Count one cycle; `ranks` None says that all accepted drafts were the best."""
        self.cycles += 1
        self.committed += committed
        while len(self.offered) < drafts:
            self.offered.append(0)
            self.accepted.append(0)
        for position in range(drafts):
            self.offered[position] += 1
            self.accepted[position] += position < accepted
        for rank in ranks or [0] * accepted:
            self.ranks.extend([0] * (rank + 1 - len(self.ranks)))
            self.ranks[rank] += 1

    @classmethod
    def sum(cls, each: Iterable[AcceptanceStats]) -> AcceptanceStats:
        """All of them together."""
        total = cls()
        for stats in each:
            total.add(stats)
        return total

    @property
    def tokens_per_cycle(self) -> float:
        """Committed tokens a cycle; 1.0 is what plain decoding gives."""
        return self.committed / self.cycles if self.cycles else 0.0

    @property
    def drafted(self) -> int:
        """Cycles that verified drafts."""
        return self.offered[0] if self.offered else 0

    @property
    def tokens_per_drafted_cycle(self) -> float:
        """Accepted drafts and one token more, a cycle that verified drafts."""
        return 1 + sum(self.accepted) / self.drafted if self.drafted else 1.0

    @property
    def useless(self) -> bool:
        """Whether enough cycles have shown that the drafter does not help at all."""
        return (
            self.cycles >= CYCLES_BEFORE_JUDGING
            and self.drafted >= DRAFTED_BEFORE_JUDGING
            and self.tokens_per_drafted_cycle < MIN_TOKENS_PER_CYCLE
        )

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verified drafts accepted at each position."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    def add(self, other: AcceptanceStats) -> None:
        """Add the counts of another."""
        self.cycles += other.cycles
        self.committed += other.committed
        columns = ((self.offered, other.offered), (self.accepted, other.accepted))
        for mine, theirs in (*columns, (self.ranks, other.ranks)):
            mine.extend([0] * (len(theirs) - len(mine)))
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
    """One run over a batch: the counts of all sequences and the wall time of each stage.

    The reference loop can tell drafting from verifying; a cycle of the engine is timed whole.
    """

    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    whole_seconds: float = 0.0
    """Cycles of the engine."""
    engine: Loop = "reference"
    """Which loop ran; `both` where each had a part of it."""
    engine_reason: str | None = None
    """Why it was not the engine alone, where it could have been expected."""

    @property
    def cycle_seconds(self) -> float:
        """Everything after the prefill."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds + self.whole_seconds

    @property
    def seconds(self) -> float:
        """Everything, from the prompt to the last token."""
        return self.prefill_seconds + self.cycle_seconds

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of every stage that was timed by itself."""
        apart = {
            "draft": self.draft_seconds,
            "verify": self.verify_seconds,
            "other": self.other_seconds,
        }
        found = {"prefill": self.prefill_seconds}
        if self.engine != "fast":
            found |= apart
        if self.engine != "reference":
            found["cycles"] = self.whole_seconds
        return found

    @property
    def tokens_per_cycle(self) -> float:
        """Over all sequences."""
        return self.acceptance.tokens_per_cycle

    @property
    def useless(self) -> bool:
        """Whether enough cycles have shown that the drafter does not help at all."""
        return self.acceptance.useless

    def spend(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage."""
        name = f"{stage}_seconds"
        setattr(self, name, getattr(self, name) + seconds)

    def add(self, other: RunStats) -> None:
        """Fold another run into this one."""
        if not self.seconds:
            self.engine = other.engine
        elif self.engine != other.engine:
            self.engine = "both"
        self.acceptance.add(other.acceptance)
        for stage in ("prefill", "draft", "verify", "other", "whole"):
            self.spend(stage, getattr(other, f"{stage}_seconds"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines; None for what was not timed."""
        stages = self.stages
        return {
            **self.acceptance.to_dict(),
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "cycle_seconds": self.cycle_seconds,
            "draft_seconds": stages.get("draft"),
            "verify_seconds": stages.get("verify"),
            "other_seconds": stages.get("other"),
        }


class Stopwatch:
    """Adds wall time to the stages of a run, waiting for the device at each boundary."""

    def __init__(self, stats: RunStats, device: torch.device) -> None:
        self._stats = stats
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside as `name`."""
        start = now(self._device)
        try:
            yield
        finally:
            self._stats.spend(name, now(self._device) - start)


def now(device: torch.device) -> float:
    """The time once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
