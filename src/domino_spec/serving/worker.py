"""The one thread that decodes: rows come between cycles, blocks go out, no reader is waited for."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from domino_spec.errors import DominoError
from domino_spec.serving.asks import BusyError, DecodingError, StoppingError
from domino_spec.serving.fair import FairQueue
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import Lane
from domino_spec.serving.meters import Meter

_log = logging.getLogger("domino_spec.serving")
_LONGEST_RETRY = 120.0
_MEMORY = 0.9
"""How much the mean time of an answer remembers of those before."""


@dataclass
class _Track:
    """A lane, those who wait for it, and the time it has had."""

    make: Callable[[], Lane]
    lane: Lane | None = None
    queue: FairQueue[Job] = field(default_factory=FairQueue)
    spent: float = 0.0
    """Seconds a row, while another lane was busy: both get equal time for each row.

    Time that nobody else wanted is not counted, or a lane would pay for it later.
    """

    @property
    def running(self) -> int:
        return 0 if self.lane is None else self.lane.running


class Worker:
    """Takes jobs from any thread, decodes them in its own."""

    def __init__(
        self, main: Lane, plain: Callable[[], Lane] | None, *, max_queue: int, meter: Meter
    ) -> None:
        """`plain` makes the lane of those who want no drafts, when first wanted; None: `main`."""
        drafting = _Track(lambda: main, main)
        self._tracks = {True: drafting, False: _Track(plain) if plain else drafting}
        self._max_queue = max_queue
        self._meter = meter
        self._changed = threading.Condition()
        self._cancelled: list[Job] = []
        self._deadline: float | None = None  # set: takes nothing new, ends then at the latest
        self._broken: str | None = None
        self._mean_seconds = 1.0
        self._gauges: tuple[int, int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="domino-worker", daemon=True)

    # For any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def state(self) -> str:
        """`ready`, `stopping` or `failed`."""
        if self._broken is not None:
            return "failed"
        return "ready" if self._deadline is None else "stopping"

    @property
    def ended(self) -> bool:
        """Whether its thread has come to an end."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Rows without a slot yet."""
        return sum(len(track.queue) for track in self._each_track())

    @property
    def running(self) -> int:
        """Rows in slots."""
        return sum(track.running for track in self._each_track())

    @property
    def slots(self) -> int:
        """Of all lanes that were made."""
        return sum(track.lane.slots for track in self._each_track() if track.lane is not None)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these or none."""
        with self._changed:
            if self._broken is not None:
                raise StoppingError(f"the server cannot decode any more: {self._broken}.")
            if self._deadline is not None:
                raise StoppingError("the server is going down and takes nothing new.")
            free = max(0, self.slots - self.running)
            if self.waiting + len(jobs) > self._max_queue + free:
                raise BusyError(
                    f"{self.waiting} answers are waiting already and {len(jobs)} more would be "
                    f"over the limit of {self._max_queue}; come back later.",
                    retry_after=self._retry_after(),
                )
            for job in jobs:
                self._tracks[job.ask.speculate].queue.put(job, client=job.client, cost=job.cost)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Take these out between two cycles; harmless for what is over."""
        with self._changed:
            self._cancelled.extend(job for job in jobs if not job.over)
            self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Take nothing new; what is not done by then ends with an error."""
        with self._changed:
            deadline = time.monotonic() + seconds
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread; `drain` first."""
        if self._thread.ident is not None:
            self._thread.join()

    def _retry_after(self) -> float:
        turns = (self.waiting + 1) / max(1, self.slots)
        return float(min(max(1, math.ceil(turns * self._mean_seconds)), _LONGEST_RETRY))

    def _each_track(self) -> Iterator[_Track]:
        yield self._tracks[True]
        if self._tracks[False] is not self._tracks[True]:
            yield self._tracks[False]

    # In its own thread ------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                self._fill()
                track = self._due()
                if track is not None:
                    self._turn(track)
                self._gauge()
        except BaseException as error:  # a bug of this file: nobody may wait for ever
            _log.exception("the worker stopped")
            self._break(f"its worker stopped ({type(error).__name__})")
        finally:
            self._end_all(StoppingError("the server went down before this answer was complete."))
            self._gauge()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._changed:
            while True:
                if self._broken is not None:
                    return False
                busy = bool(self.running or self.waiting)
                if self._deadline is not None:
                    return busy and time.monotonic() < self._deadline
                if busy or self._cancelled:
                    return True
                self._changed.wait()

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            for job in cancelled:
                self._tracks[job.ask.speculate].queue.remove(job)
        for job in cancelled:
            lane = self._tracks[job.ask.speculate].lane
            if lane is not None:
                lane.release(job)
            job.cancel(self._meter)

    def _fill(self) -> None:
        for track in self._each_track():
            if not len(track.queue):
                continue
            if track.lane is None:
                self._open(track)
            while track.lane is not None and track.lane.free:
                with self._changed:
                    job = track.queue.take()
                if job is None:
                    break
                self._begin(track, job)

    def _open(self, track: _Track) -> None:
        try:
            track.lane = track.make()
        except Exception as error:
            _log.exception("no lane could be made")
            with self._changed:
                jobs = track.queue.clear()
            for job in jobs:
                job.fail(_told(error), self._meter)

    def _begin(self, track: _Track, job: Job) -> None:
        assert track.lane is not None
        if not track.running:  # it has saved no time up while it had nothing to do
            busy = [each.spent for each in self._each_track() if each.running]
            track.spent = max([track.spent, *([min(busy)] if busy else [])])
        try:
            track.lane.begin(job)
        except Exception as error:
            _log.exception("an answer could not begin")
            job.fail(_told(error), self._meter)

    def _due(self) -> _Track | None:
        """Of the lanes with rows the one that has had the least time."""
        busy = [track for track in self._each_track() if track.running]
        return min(busy, key=lambda track: track.spent, default=None)

    def _turn(self, track: _Track) -> None:
        assert track.lane is not None
        alone = not any(each.running for each in self._each_track() if each is not track)
        rows, start = track.running, time.perf_counter()
        try:
            results = track.lane.turn()
        except Exception as error:
            _log.exception("a cycle failed")
            self._recover(track.lane, error)
            return
        if not alone:
            track.spent += (time.perf_counter() - start) / rows
        for job, commit in results.commits:
            job.commit(commit, self._meter)
            if job.over:
                spent = time.perf_counter() - job.asked
                self._mean_seconds += (1 - _MEMORY) * (spent - self._mean_seconds)
        for job, failure in results.failures:
            _log.error("an answer failed", exc_info=failure)
            job.fail(_told(failure), self._meter)

    def _recover(self, lane: Lane, error: Exception) -> None:
        """A whole cycle failed: its rows are lost, the lane begins anew, the queue goes on."""
        for job in lane.jobs():
            job.fail(_told(error), self._meter)
        try:
            lane.reset()
        except Exception:
            _log.exception("the lane could not be reset")
            self._break(f"after {type(error).__name__} its slots could not be made anew")

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = reason

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            self._deadline = self._deadline or time.monotonic()  # nobody may queue behind this
            waiting = [job for track in self._each_track() for job in track.queue.clear()]
            self._cancelled.clear()
        for track in self._each_track():
            for job in () if track.lane is None else track.lane.jobs():
                track.lane.release(job)  # type: ignore[union-attr]
                waiting.append(job)
        for job in waiting:
            job.fail(error, self._meter)

    def _gauge(self) -> None:
        found = (self.waiting, self.running, self.slots)
        if found != self._gauges:
            self._gauges = found
            waiting, running, slots = found
            self._meter.queue(waiting=waiting, running=running, slots=slots)


def _told(error: Exception) -> Exception:
    """What a client may know: our own words, or that it was not the client's fault."""
    if isinstance(error, DominoError):
        return error
    wrapped = DecodingError(f"decoding failed ({type(error).__name__}); the log knows more.")
    wrapped.__cause__ = error
    return wrapped
