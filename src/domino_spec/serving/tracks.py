"""A lane with those who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from domino_spec.serving.fair import FairQueue
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import Lane


@dataclass
class Track:
    """A lane, those who wait for it, and the time it has had."""

    make: Callable[[], Lane]
    lane: Lane | None = None
    queue: FairQueue[Job] = field(default_factory=FairQueue)
    spent: float = 0.0
    """Seconds a row, while another lane was busy: both get equal time for each row.

    Time that nobody else wanted is not counted, or a lane would pay for it later.
    """
    beginning: Job | None = None
    """Taken from the queue and not in its slot yet."""

    @property
    def running(self) -> int:
        return 0 if self.lane is None else self.lane.running

    def without_slot(self, more: int) -> int:
        """Rows that would wait if so many more came. A lane nobody has made has a slot at least."""
        if self.lane is None:
            return max(0, len(self.queue) + more - 1)
        coming = self.beginning is not None and not self.lane.holds(self.beginning)
        return max(0, len(self.queue) + more + self.running + coming - self.lane.slots)
