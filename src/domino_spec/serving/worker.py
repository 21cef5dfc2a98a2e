"""The one thread that decodes: rows come between cycles, blocks go out, no reader is waited for."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

import torch

from domino_spec.errors import DominoError, InputError
from domino_spec.serving.asks import BusyError, DecodingError, StoppingError
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import Lane, Results
from domino_spec.serving.meters import Forgiven, Meter
from domino_spec.serving.tracks import Track

_log = logging.getLogger("domino_spec.serving")
_LONGEST_RETRY = 120.0
_MEMORY = 0.9
"""How much the mean time of an answer remembers of those before."""


class Worker:
    """Takes jobs from any thread, decodes them in its own."""

    def __init__(
        self, main: Lane, plain: Callable[[], Lane] | None, *, max_queue: int, meter: Meter
    ) -> None:
        """`plain` makes the lane of those who want no drafts, when first wanted; None: `main`."""
        drafting = Track(lambda: main, main)
        self._tracks = {True: drafting, False: Track(plain) if plain else drafting}
        self._max_queue = max_queue
        self._meter = Forgiven(meter)
        self._changed = threading.Condition()
        self._cancelled: list[Job] = []
        self._deadline: float | None = None  # set: takes nothing new, ends then at the latest
        self._broken: str | None = None
        self._mean_seconds = 1.0
        self._gauges: tuple[int, int, int] | None = None
        self._last: Track | None = None  # whose cycle may still be under way
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
            if self._without_slot(jobs) > self._max_queue:
                self._check_ever(len(jobs))
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

    def _without_slot(self, jobs: Sequence[Job]) -> int:
        tracks = [self._tracks[job.ask.speculate] for job in jobs]
        return sum(
            each.without_slot(sum(track is each for track in tracks)) for each in self._each_track()
        )

    def _check_ever(self, count: int) -> None:
        """Who could not be taken by an idle server either is not told to come back."""
        most = self._max_queue + max(1, self.slots)
        if count > most:
            raise InputError(
                f"{count} answers are asked for at once; this server takes {most}. Ask for fewer."
            )

    def _retry_after(self) -> float:
        turns = (self.waiting + 1) / max(1, self.slots)
        return float(min(max(1, math.ceil(turns * self._mean_seconds)), _LONGEST_RETRY))

    def _each_track(self) -> Iterator[Track]:
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
                    job = track.beginning = track.queue.take()
                if job is None:
                    break
                self._begin(track, job)
                with self._changed:
                    track.beginning = None

    def _open(self, track: Track) -> None:
        try:
            track.lane = track.make()
        except Exception as error:
            _log.exception("no lane could be made")
            with self._changed:
                jobs = track.queue.clear()
            for job in jobs:
                job.fail(_told(error), self._meter)

    def _begin(self, track: Track, job: Job) -> None:
        assert track.lane is not None
        if not track.running:  # it has saved no time up while it had nothing to do
            each = list(self._each_track())
            busy = [other.spent for other in each if other.running]
            now = min(busy) if busy else max(other.spent for other in each)
            track.spent = max(track.spent, now)
        job.begin()
        try:
            track.lane.begin(job)
        except Exception as error:
            _log.exception("an answer could not begin")
            job.fail(_told(error), self._meter)

    def _due(self) -> Track | None:
        """Of the lanes with rows the one that has had the least time."""
        busy = [track for track in self._each_track() if track.running]
        return min(busy, key=lambda track: track.spent, default=None)

    def _turn(self, track: Track) -> None:
        """A turn of one lane, alone on the machine: what it takes is its own time."""
        last, self._last = self._last, track
        if last is not None and last is not track and last.lane is not None:
            self._spend(last, last.lane, last.lane.settle, counts=True)
        assert track.lane is not None
        alone = not any(each.running for each in self._each_track() if each is not track)
        self._spend(track, track.lane, track.lane.turn, counts=not alone)

    def _spend(
        self, track: Track, lane: Lane, work: Callable[[Results], None], *, counts: bool
    ) -> None:
        results, rows, start = Results(), max(1, lane.running), time.perf_counter()
        failure = None
        try:
            work(results)
        except Exception as error:
            failure = error
        finally:  # what came before a failure too: some of it may have ended
            if counts:
                track.spent += (time.perf_counter() - start) / rows
            self._hand_out(results)
        if failure is not None:
            _log.error("a cycle failed", exc_info=failure)
            self._recover(lane, failure)

    def _hand_out(self, results: Results) -> None:
        for job, commit in results.commits:
            job.commit(commit, self._meter)
            if job.over:
                self._mean_seconds += (1 - _MEMORY) * (job.seconds - self._mean_seconds)
        for job, failure in results.failures:
            _log.error("an answer failed", exc_info=failure)
            job.fail(_told(failure), self._meter)

    def _recover(self, lane: Lane, error: Exception) -> None:
        """A whole cycle failed: its rows are lost, the lane begins anew, the queue goes on."""
        _empty(error)  # or there would be slots twice while new ones are made
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
            waiting = [job for track in self._each_track() for job in track.queue.clear()]
            self._cancelled.clear()
        for track in self._each_track():
            waiting.extend(() if track.lane is None else track.lane.jobs())
            waiting.extend(() if track.beginning is None else [track.beginning])
        for job in waiting:
            job.fail(error, self._meter)
        for track in self._each_track():
            for job in () if track.lane is None else track.lane.jobs():
                track.lane.release(job)  # type: ignore[union-attr]

    def _gauge(self) -> None:
        found = (self.waiting, self.running, self.slots)
        if found != self._gauges:
            self._gauges = found
            waiting, running, slots = found
            self._meter.queue(waiting=waiting, running=running, slots=slots)


def _told(error: Exception) -> Exception:
    """What a client may know: our own words, or that it was not the client's fault."""
    _empty(error)
    if isinstance(error, DominoError):
        return error
    wrapped = DecodingError(f"decoding failed ({type(error).__name__}); the log knows more.")
    wrapped.__cause__ = error
    return wrapped


def _empty(error: BaseException | None) -> None:
    """Give back what an error holds: the variables of all it came through, tensors among them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
