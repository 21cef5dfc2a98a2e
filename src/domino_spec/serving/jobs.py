"""One answer in the making."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from domino_spec.decoding import Commit, Row
from domino_spec.serving.asks import Ask, Block, Ended, Event, Failed
from domino_spec.serving.meters import Meter


@dataclass(eq=False)
class Job:
    """An ask, its row, and who listens. Only the worker's thread changes it once it is queued."""

    ask: Ask
    row: Row
    choice: int
    client: str
    deliver: Callable[[Event], None]
    """Hands an event to whoever waits; never blocks, never raises."""
    asked: float = field(default_factory=time.perf_counter)
    cached: int = 0
    """Prompt tokens whose states were there already."""
    over: bool = False
    _began: float | None = None
    _last: float | None = None
    _offered: int = 0

    @property
    def cost(self) -> int:
        """Tokens it may come to."""
        return len(self.row.prompt) + self.row.max_new_tokens

    @property
    def seconds(self) -> float:
        """Since it has a slot; how long it waited for one says nothing of the answer."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def begin(self) -> None:
        """It gets a slot."""
        self._began = time.perf_counter()

    def commit(self, commit: Commit, meter: Meter) -> None:
        """A block was committed, perhaps the last one."""
        now = time.perf_counter()
        if self._last is None:
            meter.first_token(now - self.asked)
        else:
            offered = sum(self.row.stats.offered)
            meter.block(commit, drafts=offered - self._offered, seconds=now - self._last)
            self._offered = offered
        self._last = now
        self.deliver(Block(choice=self.choice, commit=commit, cached=self.cached))
        if commit.finish_reason is not None:
            self._end(commit.finish_reason, meter)
            self.deliver(
                Ended(choice=self.choice, reason=commit.finish_reason, stats=self.row.stats)
            )

    def fail(self, error: Exception, meter: Meter) -> None:
        """It will not be completed."""
        if not self.over:
            self._end("failed", meter)
            self.deliver(Failed(choice=self.choice, error=error))

    def cancel(self, meter: Meter) -> None:
        """Nobody listens any more."""
        if not self.over:
            self._end("cancelled", meter)

    def _end(self, reason: str, meter: Meter) -> None:
        self.over = True
        meter.ended(reason, seconds=time.perf_counter() - self.asked)
