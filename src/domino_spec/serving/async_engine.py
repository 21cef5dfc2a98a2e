"""An engine for many callers: one thread steps it, outputs go to each request's stream."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import torch

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput
from domino_spec.errors import DominoError, InputError
from domino_spec.serving.errors import BusyError, DecodingError, StoppingError
from domino_spec.serving.meters import Forgiven, Meter

_log = logging.getLogger("domino_spec.serving")
_LONGEST_RETRY = 120.0
_MEMORY = 0.9
"""How much the mean time of an answer remembers of those before."""


class StepEngine(Protocol):
    """`Engine`, or `ReferenceEngine` for what that cannot run."""

    @property
    def running(self) -> int:
        """Sequences in slots."""

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at a time."""

    def add_request(self, sequence: Decoded, /) -> Decoded:
        """Queue a sequence."""

    def step(self) -> list[SequenceOutput]:
        """Schedule, run, collect."""

    def abort(self, sequence: Decoded, /) -> None:
        """Take a sequence out."""

    def reset(self, error: Exception, /) -> list[Decoded]:
        """Begin anew after a step that failed; the sequences that were lost."""


class OutputStream:
    """The outputs of a request's sequences, in the order in which they happen.

    Iterate in the event loop it was made in. Outputs wait here for a slow reader; there are never
    more than the sequences have tokens.
    """

    def __init__(
        self, sequences: Sequence[Decoded], cancel: Callable[[Sequence[Decoded]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[SequenceOutput | None] = asyncio.Queue()  # None: cancelled
        self._open = len(sequences)
        self._cancel = cancel
        self.sequences = sequences
        for sequence in sequences:
            sequence.listener = self.deliver

    def deliver(self, output: SequenceOutput) -> None:
        """From any thread; a loop that is gone hears nothing."""
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)
        except RuntimeError:
            return

    def cancel(self) -> None:
        """The client is gone: slots are freed before the next step."""
        if self._open:
            self._open = 0
            self._outputs.put_nowait(None)
            self._cancel(self.sequences)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> SequenceOutput:
        if not self._open:
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output is None or not self._open:  # cancelled meanwhile
            raise StopAsyncIteration
        if output.finish_reason is not None or output.error is not None:
            self._open -= 1
        return output

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class AsyncEngine:
    """Takes sequences from any thread, decodes them in its own."""

    def __init__(self, engine: StepEngine, *, max_queue: int, meter: Meter) -> None:
        self.engine = engine
        self._max_queue = max_queue
        self._meter = Forgiven(meter)
        self._changed = threading.Condition()
        self._added: list[Decoded] = []
        self._cancelled: list[Decoded] = []
        self._held: dict[int, Decoded] = {}
        """Sequences taken from `_added` that have not ended, by identity."""
        self._slots = engine.max_sequences  # kept: a reset has none for a moment
        self._deadline: float | None = None  # set: takes nothing new, ends then at the latest
        self._broken: str | None = None
        self._mean_seconds = 1.0
        self._gauges: tuple[int, int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="domino-engine", daemon=True)

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
        """Sequences without a slot yet."""
        return max(0, self._unfinished - self.running)

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return self.engine.running

    @property
    def slots(self) -> int:
        """Sequences that can run at a time."""
        return self._slots

    @property
    def _unfinished(self) -> int:
        """Sequences taken and not yet ended, also those on their way to the engine."""
        return len(self._added) + len(self._held)

    def submit(self, sequences: Sequence[Decoded]) -> None:
        """Queue all of these or none."""
        with self._changed:
            if self._broken is not None:
                raise StoppingError(f"the server cannot decode any more: {self._broken}.")
            if self._deadline is not None:
                raise StoppingError("the server is going down and takes nothing new.")
            over = self._unfinished + len(sequences) - self.slots
            if over > self._max_queue:
                self._check_ever(len(sequences))
                raise BusyError(
                    f"{self.waiting} answers are waiting already and {len(sequences)} more would "
                    f"be over the limit of {self._max_queue}; come back later.",
                    retry_after=self._retry_after(),
                )
            self._added.extend(sequences)
            self._changed.notify()

    def cancel(self, sequences: Sequence[Decoded]) -> None:
        """Take these out between two steps; harmless for what is over."""
        with self._changed:
            self._cancelled.extend(each for each in sequences if not each.finished)
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

    def _check_ever(self, count: int) -> None:
        """What an idle server could not take either is not told to come back."""
        most = self._max_queue + max(1, self.slots)
        if count > most:
            raise InputError(
                f"{count} answers are asked for at once; this server takes {most}. Ask for fewer."
            )

    def _retry_after(self) -> float:
        turns = (self.waiting + 1) / max(1, self.slots)
        return float(min(max(1, math.ceil(turns * self._mean_seconds)), _LONGEST_RETRY))

    # In its own thread ------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._take_in()
                self._step()
                self._gauge()
        except BaseException as error:  # a bug of this file: no client may wait for ever
            _log.exception("the engine's thread stopped")
            self._break(f"its engine stopped ({type(error).__name__})")
        finally:
            self._end_all(StoppingError("the server went down before this answer was complete."))
            self._gauge()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._changed:
            while True:
                if self._broken is not None:
                    return False
                busy = bool(self._held or self._added)
                if self._deadline is not None:
                    return busy and time.monotonic() < self._deadline
                if busy or self._cancelled:
                    return True
                self._changed.wait()

    def _take_in(self) -> None:
        with self._changed:
            added, self._added = self._added, []
            cancelled, self._cancelled = self._cancelled, []
            for sequence in added:
                self._held[id(sequence)] = sequence
        for sequence in cancelled:  # those that were added in the same moment never begin
            if self._held.pop(id(sequence), None) is not None:
                self.engine.abort(sequence)
                self._meter.ended("cancelled", seconds=time.perf_counter() - sequence.arrived)
        for sequence in added:
            if id(sequence) not in self._held:
                continue
            try:
                self.engine.add_request(sequence)
            except Exception as error:
                _log.exception("an answer could not begin")
                self._fail(sequence, error)

    def _step(self) -> None:
        if not self._held:
            return
        try:
            outputs = self.engine.step()
        except Exception as error:
            _log.error("a step failed", exc_info=error)
            self._recover(error)
            return
        for output in outputs:
            self._hand_out(output)

    def _hand_out(self, output: SequenceOutput) -> None:
        sequence, now = output.sequence, time.perf_counter()
        if output.error is not None:
            _log.error("an answer failed", exc_info=output.error)
            self._fail(sequence, output.error)
            return
        if output.cycle == 0:
            self._meter.first_token(now - sequence.arrived)
        else:
            self._meter.block(output, seconds=now - sequence.last_output)
        sequence.last_output = now
        if output.finish_reason is not None:
            self._held.pop(id(sequence), None)
            seconds = now - (sequence.admitted or sequence.arrived)
            self._mean_seconds += (1 - _MEMORY) * (seconds - self._mean_seconds)
            self._meter.ended(output.finish_reason, seconds=now - sequence.arrived)
        if sequence.listener is not None:
            sequence.listener(output)

    def _fail(self, sequence: Decoded, error: Exception) -> None:
        """The sequence will not be completed, and its client hears why."""
        if self._held.pop(id(sequence), None) is None:
            return
        sequence.error = told = _told(error)
        self._meter.ended("failed", seconds=time.perf_counter() - sequence.arrived)
        if sequence.listener is not None:
            reason, cycle = sequence.finish_reason, sequence.cycles
            sequence.listener(SequenceOutput(sequence, (), 0, cycle, reason, error=told))

    def _recover(self, error: Exception) -> None:
        """A whole step failed: its sequences are lost, the caches are new, the queue goes on."""
        _clear(error)  # or there would be caches twice while new ones are made
        try:
            self.engine.reset(error)
        except Exception:
            _log.exception("the engine could not be reset")
            self._break(f"after {type(error).__name__} its caches could not be made anew")
            return
        held = list(self._held.values())
        # Also those that ended in this step, whose output is lost. Where no sequence is lost the
        # next step would fail as this one did.
        for sequence in [each for each in held if each.finished] or held:
            self._fail(sequence, error)
            self.engine.abort(sequence)

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken = reason

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            for sequence in self._added:
                self._held[id(sequence)] = sequence
            self._added.clear()
            self._cancelled.clear()
        left = list(self._held.values())
        for sequence in left:
            self._fail(sequence, error)
        for sequence in left:
            self.engine.abort(sequence)

    def _gauge(self) -> None:
        self._slots = self.engine.max_sequences
        found = (self.waiting, self.running, self.slots)
        if found != self._gauges:
            self._gauges = found
            waiting, running, slots = found
            self._meter.queue(waiting=waiting, running=running, slots=slots)


def _told(error: Exception) -> Exception:
    """What a client may know: our own words, or that it was not the client's fault."""
    _clear(error)
    if isinstance(error, DominoError):
        return error
    wrapped = DecodingError(f"decoding failed ({type(error).__name__}); the log knows more.")
    wrapped.__cause__ = error
    return wrapped


def _clear(error: BaseException | None) -> None:
    """Give back what an error holds: the variables of all it came through, tensors among them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
