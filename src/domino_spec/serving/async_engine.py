"""An engine for many callers: one thread steps it, outputs go to each request's stream."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput
from domino_spec.errors import DominoError, InputError
from domino_spec.serving.errors import DecodingError, QueueFullError, ShuttingDownError
from domino_spec.serving.metrics import Metrics

_log = logging.getLogger("domino_spec.serving")
_MAX_RETRY_SECONDS = 120
_REST = 5.0
"""How long the event loop leaves the interpreter to the engine, by what a delivery took it."""
_LONGEST_REST = 0.05
_REMEMBERED = 64
"""Sequences that ended, whose times say how long others will take."""
_MOST_INPUT_BYTES = 1 << 30
"""Of pixel values and the like that sequences hold which run or wait; one alone may hold more."""
_EVEN = 0.35
"""So many fewer are expected to have left at the time by which it is as likely as not: 0.5 for one
slot, a median of Poisson's distribution for many."""


class StepEngine(Protocol):
    """`Engine`, or `ReferenceEngine` for what that cannot run."""

    @property
    def running(self) -> int:
        """Sequences in slots."""

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at a time."""

    @property
    def cache_usage(self) -> float:
        """The share of the caches that sequences hold."""

    def add_request(self, sequence: Decoded, /) -> Decoded:
        """Queue a sequence."""

    def step(self) -> list[SequenceOutput]:
        """Schedule, run, collect."""

    def abort(self, sequence: Decoded, /) -> None:
        """Take a sequence out."""

    def reset(self, error: Exception, /) -> list[SequenceOutput]:
        """Begin anew after a step that failed; what it had collected, and what is lost."""


class _Wakeup:
    """Brings outputs into an event loop, all of a step by one call: each call is a system call.

    Whatever the loop does, the engine's thread waits for: there is one interpreter lock. So the
    loop rests after each delivery, in proportion to what that took. With few streams this is less
    than a step; with many, outputs of several steps come together and are sent as one. First and
    last outputs do not wait: a client's next request may.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[OutputStream] = deque()
        """Streams with outputs to come, some of them more than once."""
        self._scheduled = False
        self._rests_until = 0.0

    def post(self, stream: OutputStream, *, urgent: bool) -> None:
        """From any thread: this stream has outputs."""
        try:
            if urgent:
                self.loop.call_soon_threadsafe(stream.receive)
                return
            self._waiting.append(stream)
            if not self._scheduled:
                self._scheduled = True
                self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed
            self._waiting.clear()

    def _wake(self) -> None:
        rest = self._rests_until - self.loop.time()
        if rest > 0:
            self.loop.call_later(rest, self._run)
        else:
            self._run()

    def _run(self) -> None:
        began = time.thread_time()  # without what this thread waited for the interpreter
        self._scheduled = False  # before the first is taken: what is posted meanwhile comes again
        while self._waiting:
            self._waiting.popleft().receive()
        self.loop.call_soon(self._rest, began)  # after all readers, which were woken before it

    def _rest(self, began: float) -> None:
        spent = time.thread_time() - began
        self._rests_until = self.loop.time() + min(_REST * spent, _LONGEST_REST)


class OutputStream:
    """The outputs of a request's sequences, in order; each iteration gives all that have come.

    Iterate in the event loop it was made in. Outputs wait here for a slow reader; there are never
    more than the sequences have tokens.
    """

    def __init__(
        self,
        sequences: Sequence[Decoded],
        cancel: Callable[[Sequence[Decoded]], None],
        wakeup: _Wakeup | None = None,
    ) -> None:
        """`wakeup` is the one that all streams of an event loop share."""
        self._wakeup = wakeup or _Wakeup(asyncio.get_running_loop())
        self._incoming: deque[SequenceOutput] = deque()
        self._outputs: list[SequenceOutput] = []
        self._changed = asyncio.Event()
        self._open = len(sequences)
        self._cancel = cancel
        self.sequences = sequences
        for sequence in sequences:
            sequence.listener = self.deliver

    def deliver(self, output: SequenceOutput) -> None:
        """From any thread; a loop that is gone hears nothing."""
        self._incoming.append(output)
        last = output.finish_reason is not None or output.error is not None
        self._wakeup.post(self, urgent=last or output.cycle == 0)

    def receive(self) -> None:
        """In the event loop: take in what has come, if some has."""
        while self._incoming:
            self._outputs.append(self._incoming.popleft())
            self._changed.set()

    def cancel(self) -> None:
        """The client is gone: slots are freed before the next step."""
        if self._open:
            self._open = 0
            self._changed.set()
            self._cancel(self.sequences)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        if self._open:
            await self._changed.wait()
            self._changed.clear()
        if not self._open:  # ended, or cancelled meanwhile
            raise StopAsyncIteration
        outputs, self._outputs = self._outputs, []
        self._open -= sum(o.finish_reason is not None or o.error is not None for o in outputs)
        return outputs

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


def _input_bytes(sequences: Iterable[Decoded]) -> int:
    """Of what their prefills take besides token ids; choices of one request share it."""
    tensors = (value for each in sequences for value in each.multimodal_inputs.values())
    return sum({id(t): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}.values())


class AsyncEngine:
    """Takes sequences from any thread, decodes them in its own."""

    def __init__(self, engine: StepEngine, *, max_queue: int, metrics: Metrics) -> None:
        self.engine = engine
        self._max_queue = max_queue
        self._metrics = metrics
        self._changed = threading.Condition()
        self._added: list[Decoded] = []
        self._held: dict[int, Decoded] = {}
        """Sequences taken from `_added` that have not ended, by identity."""
        self._cancelled: dict[int, Decoded] = {}
        """Of both, those to be taken out before the next step."""
        self.slots = engine.max_sequences
        """Sequences that can run at a time; kept, since a reset has none for a moment."""
        self._deadline: float | None = None  # set: takes nothing new, ends then at the latest
        self._failure: str | None = None
        self._slot_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        """How long the sequences that ended last were in their slots."""
        self._wakeup: _Wakeup | None = None
        self._thread = threading.Thread(target=self._run, name="domino-engine", daemon=True)

    # For any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def state(self) -> str:
        """`ready`, `stopping` or `failed`."""
        if self._failure is not None:
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
    def _unfinished(self) -> int:
        """Sequences neither ended nor cancelled, also those on their way to the engine."""
        return len(self._added) + len(self._held) - len(self._cancelled)

    def submit(self, sequences: Sequence[Decoded]) -> None:
        """Queue all of these or none."""
        with self._changed:
            if self._failure is not None:
                raise ShuttingDownError(f"the server cannot decode any more: {self._failure}.")
            if self._deadline is not None:
                # Another server can take its place once this one has ended.
                raise ShuttingDownError(
                    "the server is going down and takes nothing new.",
                    retry_after=self._deadline - time.monotonic(),
                )
            over = self._unfinished + len(sequences) - self.slots
            if over > self._max_queue:
                slots = max(1, self.slots)
                most = self._max_queue + slots
                if len(sequences) > most:  # an idle server could not take them either
                    raise InputError(
                        f"{len(sequences)} sequences are requested at once; this server takes "
                        f"{most}. Request fewer."
                    )
                seconds = self._retry_after(over - self._max_queue)
                raise QueueFullError(
                    f"{self.waiting} sequences wait for one of {slots} slots and {len(sequences)} "
                    f"more would be over the limit of {self._max_queue}; come back in about "
                    f"{seconds} seconds.",
                    retry_after=seconds,
                )
            own = _input_bytes(sequences)
            held = _input_bytes([*self._added, *self._held.values()]) if own else 0
            if held and held + own > _MOST_INPUT_BYTES:
                seconds = self._retry_after(1)
                raise QueueFullError(
                    f"the images of requests that run or wait take {held / 1e6:,.0f} MB as the "
                    f"target reads them, and {own / 1e6:,.0f} MB more would be over the limit of "
                    f"{_MOST_INPUT_BYTES / 1e6:,.0f} MB; come back in about {seconds} seconds.",
                    retry_after=seconds,
                )
            self._added.extend(sequences)
            self._changed.notify()

    def _retry_after(self, leaving: int) -> int:
        """The seconds that a client is told."""
        return min(max(1, math.ceil(self._seconds_until(leaving))), _MAX_RETRY_SECONDS)

    def _seconds_until(self, leaving: int) -> float:
        """When so many sequences will likely have left their slots.

        Each that runs leaves at the times at which the last ones left, as far as they are to come;
        one that is older than all of them is expected to take as long again.
        """
        now, known = time.perf_counter(), np.array(self._slot_seconds or [1.0])
        admitted = [each.admitted for each in self._held.values()]
        running = [now - since for since in admitted if since is not None]
        ages = np.array(running + [0.0] * (self.slots - len(running)))  # those will begin at once
        if leaving > len(ages):  # some that wait now have to run too
            return float(known.mean()) * leaving / max(1, self.slots)
        left = known - ages[:, None]  # [running, known]
        longer = left > 0
        chances = longer / np.maximum(1, longer.sum(1, keepdims=True))
        alone = ~longer.any(1)
        times = np.concatenate([left[longer], ages[alone]])
        weights = np.concatenate([chances[longer], np.ones(int(alone.sum()))])
        order = times.argsort()
        enough = np.searchsorted(weights[order].cumsum(), leaving - _EVEN)
        return float(times[order][min(int(enough), len(times) - 1)])

    def stream(self, sequences: Sequence[Decoded]) -> OutputStream:
        """Queue these and give their outputs, in the event loop that calls it."""
        loop = asyncio.get_running_loop()
        if self._wakeup is None or self._wakeup.loop is not loop:
            self._wakeup = _Wakeup(loop)
        stream = OutputStream(sequences, self.cancel, self._wakeup)
        self.submit(sequences)
        return stream

    def cancel(self, sequences: Iterable[Decoded]) -> None:
        """Take these out between two steps; harmless for what has ended."""
        with self._changed:
            known = self._held.keys() | set(map(id, self._added))
            self._cancelled |= {id(each): each for each in sequences if id(each) in known}
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

    # In its own thread ------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        try:
            while self._wait():
                self._update_requests()
                self._step()
                self._update_gauges()
        except BaseException as error:  # a bug of this file: no client may wait for ever
            _log.exception("the engine's thread stopped")
            self._set_failure(f"its engine stopped ({type(error).__name__})")
        finally:
            self._end_all(ShuttingDownError("the server went down before this request was done."))
            self._update_gauges()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is time to end."""
        with self._changed:
            while True:
                if self._failure is not None:
                    return False
                busy = bool(self._held or self._added)
                if self._deadline is not None:
                    return busy and time.monotonic() < self._deadline
                if busy:
                    return True
                self._changed.wait()

    def _update_requests(self) -> None:
        with self._changed:
            added, self._added = self._added, []
            cancelled = list(self._cancelled.values())
            self._held |= {id(sequence): sequence for sequence in added}
        for sequence in cancelled:  # those that were added in the same moment never begin
            if self._release(sequence):
                self.engine.abort(sequence)
                _record(self._metrics.observe_finished, sequence, "cancelled")
        for sequence in added:
            if id(sequence) not in self._held:
                continue
            try:
                self.engine.add_request(sequence)
            except Exception as error:
                _log.exception("a sequence could not be added")
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
        now = time.perf_counter()
        for output in outputs:
            self._deliver(output, now)

    def _deliver(self, output: SequenceOutput, now: float) -> None:
        sequence = output.sequence
        if output.error is not None:
            _log.error("a sequence failed", exc_info=output.error)
            self._fail(sequence, output.error)
            return
        _record(self._metrics.observe_output, output, now=now)
        sequence.last_output = now
        if output.finish_reason is not None:
            self._release(sequence)
            _record(self._metrics.observe_finished, sequence, output.finish_reason)
        if sequence.listener is not None:
            sequence.listener(output)

    def _release(self, sequence: Decoded) -> bool:
        """It has ended or is to be taken out; whether it was held."""
        with self._changed:
            self._cancelled.pop(id(sequence), None)
            held = self._held.pop(id(sequence), None) is not None
            if held and sequence.admitted is not None:
                self._slot_seconds.append(time.perf_counter() - sequence.admitted)
            return held

    def _fail(self, sequence: Decoded, error: Exception) -> None:
        """The sequence will not be completed, and its client is told why."""
        if not self._release(sequence):
            return
        sequence.error = told = _public_error(error)
        _record(self._metrics.observe_finished, sequence, "failed")
        if sequence.listener is not None:
            reason, cycle = sequence.finish_reason, sequence.cycles
            sequence.listener(SequenceOutput(sequence, (), 0, cycle, reason, error=told))

    def _recover(self, error: Exception) -> None:
        """A whole step failed: its sequences are lost, the caches are new, the queue goes on."""
        _clear(error)  # or there would be caches twice while new ones are made
        try:
            outputs = self.engine.reset(error)
        except Exception:
            _log.exception("the engine could not be reset")
            self._set_failure(f"after {type(error).__name__} its caches could not be made anew")
            return
        now = time.perf_counter()
        for output in outputs:
            if output.error is None:
                self._deliver(output, now)
            else:
                self._fail(output.sequence, error)
        # Where no sequence is lost the next step would fail as this one did.
        held = list(self._held.values())
        for sequence in held if not outputs else [each for each in held if each.finished]:
            self._fail(sequence, error)
            self.engine.abort(sequence)

    def _set_failure(self, reason: str) -> None:
        with self._changed:
            self._failure = reason

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            self._held |= {id(sequence): sequence for sequence in self._added}
            self._added.clear()
            cancelled = list(self._cancelled.values())
        left = list(self._held.values())
        for sequence in cancelled:
            if self._release(sequence):
                _record(self._metrics.observe_finished, sequence, "cancelled")
        for sequence in left:
            self._fail(sequence, error)
        for sequence in left:
            self.engine.abort(sequence)

    def _update_gauges(self) -> None:
        self.slots = self.engine.max_sequences
        _record(
            self._metrics.set_queue, waiting=self.waiting, running=self.running, slots=self.slots,
            cache_usage=self.engine.cache_usage,
        )  # fmt: skip


def _record(observe: Callable[..., None], *values: Any, **named: Any) -> None:
    """A bug in metrics must not stop the engine's thread."""
    try:
        observe(*values, **named)
    except Exception:
        _log.exception("a metric could not be recorded")


def _public_error(error: Exception) -> Exception:
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
