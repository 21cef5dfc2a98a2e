"""An engine without a model, and listeners of an `AsyncEngine`."""

from __future__ import annotations

import threading

from domino_spec.decoding import SamplingParams, Sequence, SequenceOutput
from domino_spec.decoding.sequence import ABORTED
from domino_spec.decoding.stopping import at_length
from domino_spec.engine.scheduler import FairQueue


class FakeEngine:
    """A `StepEngine`: each step gives every running sequence one token, its own index.

    With `gated` a step waits for a permit of `gate`. `on_step` may raise before it.
    """

    def __init__(self, slots=2, *, gated=False, on_step=lambda engine: None):
        self.max_sequences = slots
        self.gated, self.gate = gated, threading.Semaphore(0)
        self.on_step = on_step
        self.steps = self.resets = 0
        self.begun: list[int] = []
        self.queue: FairQueue[Sequence] = FairQueue()
        self.sequences: list[Sequence] = []

    @property
    def running(self):
        return len(self.sequences)

    @property
    def cache_usage(self):
        return len(self.sequences) / max(1, self.max_sequences)

    def add_request(self, sequence):
        self.queue.put(sequence, client=sequence.client, cost=sequence.max_length)
        return sequence

    def step(self):
        while len(self.sequences) < self.max_sequences and (one := self.queue.take()) is not None:
            one.begin()
            self.begun.append(one.index)
            self.sequences.append(one)
        if self.gated:
            self.gate.acquire()
        self.steps += 1
        self.on_step(self)
        return [self.give(sequence) for sequence in list(self.sequences)]

    def give(self, sequence):
        cycle = len(sequence.output)
        try:
            taken = sequence.take([sequence.index])
        except Exception as error:
            sequence.error, taken = error, ()
        if sequence.finished:
            self.sequences.remove(sequence)
        drafts, reason = 2 * bool(cycle), sequence.finish_reason
        return SequenceOutput(
            sequence, taken, 0, cycle, reason, drafts=drafts, error=sequence.error
        )

    def abort(self, sequence):
        if not sequence.finished:
            sequence.finish_reason = ABORTED
        if sequence in self.sequences:
            self.sequences.remove(sequence)
        self.queue.remove(sequence)

    def reset(self, error):
        self.resets += 1
        lost, self.sequences = self.sequences, []
        for sequence in lost:
            sequence.error = error
        return [SequenceOutput(each, (), 0, each.cycles, None, error=error) for each in lost]


class Listener:
    """Keeps a sequence's outputs; `done` is set at its end."""

    def __init__(self):
        self.outputs: list[SequenceOutput] = []
        self.first, self.done = threading.Event(), threading.Event()

    def __call__(self, output):
        self.outputs.append(output)
        self.first.set()
        if output.finish_reason is not None or output.error is not None:
            self.done.set()

    @property
    def tokens(self):
        return [token for output in self.outputs for token in output.tokens]

    @property
    def reason(self):
        """Why it finished; only for one that did not fail."""
        assert self.done.wait(30)
        assert self.outputs[-1].error is None, self.outputs[-1].error
        return self.outputs[-1].finish_reason

    @property
    def error(self):
        assert self.done.wait(30)
        return self.outputs[-1].error


class Counts:
    """Metrics that remember."""

    def __init__(self):
        self.ends = []
        self.firsts = self.drafts = 0
        self.gauges = []

    def set_queue(self, *, waiting, running, slots, cache_usage):
        assert cache_usage == running / max(1, slots)
        self.gauges.append((waiting, running, slots))

    def observe_output(self, output, *, now):
        assert now >= output.sequence.last_output
        self.firsts += output.cycle == 0
        self.drafts += output.drafts

    def observe_finished(self, sequence, reason):
        self.ends.append(reason)


def request(index, *, tokens=4, client="client", prompt=(1, 2, 3), rules=(), **options):
    """A sequence and its listener."""
    params = SamplingParams(max_new_tokens=tokens)
    sequence = Sequence(
        prompt, params, index=index, stop_rules=[*rules, at_length()], client=client, **options
    )
    sequence.listener = listener = Listener()
    return sequence, listener
