"""An engine for many callers: one thread steps it, outputs go to each request's stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Protocol

import torch

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput
from domino_spec.serving.engine_client import (
    EngineClient,
    EngineMetrics,
    clear_frames,
    log,
)
from domino_spec.serving.errors import ShuttingDownError


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

    def reset(self, error: Exception, /) -> list[SequenceOutput]:
        """Begin anew after a step that failed; what it had collected, and what is lost."""


class AsyncEngine(EngineClient):
    """Takes sequences from any thread, decodes them in its own."""

    def __init__(self, engine: StepEngine, *, max_queue: int, metrics: EngineMetrics) -> None:
        super().__init__(slots=engine.max_sequences, max_queue=max_queue, metrics=metrics)
        self.engine = engine
        self._thread = threading.Thread(target=self._run, name="domino-engine", daemon=True)

    # For any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether its thread has come to an end."""
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return self.engine.running

    def cancel(self, sequences: Iterable[Decoded]) -> None:
        """Take these out between two steps; harmless for what has ended."""
        with self._changed:
            known = self._held.keys() | set(map(id, self._added))
            self._cancelled |= {id(each): each for each in sequences if id(each) in known}
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
            log.exception("the engine's thread stopped")
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
                self._observe_finished(sequence, "cancelled")
        for sequence in added:
            if id(sequence) not in self._held:
                continue
            try:
                self.engine.add_request(sequence)
            except Exception as error:
                log.exception("a sequence could not be added")
                self._fail(sequence, error)

    def _step(self) -> None:
        if not self._held:
            return
        try:
            outputs = self.engine.step()
        except Exception as error:
            log.error("a step failed", exc_info=error)
            self._recover(error)
            return
        now = time.perf_counter()
        for output in outputs:
            self._deliver(output, now)

    def _recover(self, error: Exception) -> None:
        """A whole step failed: its sequences are lost, the caches are new, the queue goes on."""
        clear_frames(error)  # or there would be caches twice while new ones are made
        try:
            outputs = self.engine.reset(error)
        except Exception:
            log.exception("the engine could not be reset")
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

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            self._held |= {id(sequence): sequence for sequence in self._added}
            self._added.clear()
            cancelled = list(self._cancelled.values())
        left = list(self._held.values())
        for sequence in cancelled:
            if self._release(sequence):
                self._observe_finished(sequence, "cancelled")
        for sequence in left:
            self._fail(sequence, error)
        for sequence in left:
            self.engine.abort(sequence)

    def _update_gauges(self) -> None:
        self.slots = self.engine.max_sequences
        super()._update_gauges()
