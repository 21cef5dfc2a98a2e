"""The engine's API over the reference loop, for targets and requests that the engine cannot run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import cast

from domino_spec.decoding import Drafter, SequenceOutput, decode
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.sequence import ABORTED
from domino_spec.engine.engine import Engine
from domino_spec.engine.sampling import unsupported_reason
from domino_spec.engine.scheduler import FairQueue
from domino_spec.targets import Target


class ReferenceEngine:
    """One sequence at a time through Transformers' own forward."""

    max_sequences = 1

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter
        self._queue: FairQueue[Decoded] = FairQueue()
        self._current: Decoded | None = None
        self._outputs: Generator[SequenceOutput, None, None] | None = None

    @property
    def running(self) -> int:
        """1 while a sequence decodes."""
        return int(self._current is not None)

    @property
    def cache_usage(self) -> float:
        """All while a sequence decodes: its caches are made for it."""
        return float(self.running)

    @property
    def waiting(self) -> int:
        """Sequences that have not begun."""
        return len(self._queue)

    def add_request(self, sequence: Decoded) -> Decoded:
        """Queue a sequence."""
        self._queue.put(sequence, client=sequence.client, cost=sequence.max_length)
        return sequence

    def step(self) -> list[SequenceOutput]:
        """One cycle of the current sequence; the first is its prefill."""
        if self._current is None:
            self._current = self._queue.take()
            if self._current is None:
                return []
            sequence = self._current
            sequence.begin()
            drafter = self._drafter if sequence.speculate else None
            outputs = decode(self._target, drafter, [sequence])
            self._outputs = cast("Generator[SequenceOutput, None, None]", outputs)
        sequence = self._current
        assert self._outputs is not None
        try:
            output = next(self._outputs)
        except Exception as error:
            sequence.error = error
            output = SequenceOutput(sequence, (), 0, sequence.cycles, None, error=error)
        if sequence.finished:
            self._close()
        return [output]

    def abort(self, sequence: Decoded) -> None:
        """Take a sequence out, waiting or running."""
        if not sequence.finished:
            sequence.finish_reason = ABORTED
        if sequence is self._current:
            self._close()
        else:
            self._queue.remove(sequence)

    def reset(self, error: Exception) -> list[SequenceOutput]:
        """The current sequence ends with the error; nothing outlives a sequence here."""
        lost = [] if self._current is None else [self._current]
        for sequence in lost:
            sequence.error = error
        self._close()
        return [SequenceOutput(each, (), 0, each.cycles, None, error=error) for each in lost]

    def _close(self) -> None:
        outputs, self._outputs, self._current = self._outputs, None, None
        if outputs is not None:
            with suppress(Exception):  # it may be the very one that raised
                outputs.close()


class FallbackEngine:
    """An engine, and in turns with its steps the reference loop for what it cannot run."""

    def __init__(self, engine: Engine, reference: ReferenceEngine) -> None:
        self._engine = engine
        self._reference = reference

    @property
    def running(self) -> int:
        """Sequences in slots, and the one in the reference loop."""
        return self._engine.running + self._reference.running

    @property
    def cache_usage(self) -> float:
        """The share of the engine's caches that sequences hold."""
        return self._engine.cache_usage

    @property
    def waiting(self) -> int:
        """Sequences that have not begun."""
        return self._engine.waiting + self._reference.waiting

    @property
    def max_sequences(self) -> int:
        """Sequences that can run at a time."""
        return self._engine.max_sequences + self._reference.max_sequences

    def add_request(self, sequence: Decoded) -> Decoded:
        """Queue a sequence where it can run."""
        if unsupported_reason(sequence) is None:
            return self._engine.add_request(sequence)
        return self._reference.add_request(sequence)

    def step(self) -> list[SequenceOutput]:
        """A step of the engine, then a cycle of the reference loop's sequence."""
        return self._engine.step() + self._reference.step()

    def abort(self, sequence: Decoded) -> None:
        """Take a sequence out, waiting or running."""
        engine = self._engine if unsupported_reason(sequence) is None else self._reference
        engine.abort(sequence)

    def reset(self, error: Exception) -> list[SequenceOutput]:
        """Both begin anew."""
        return self._engine.reset(error) + self._reference.reset(error)
