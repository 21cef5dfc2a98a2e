"""A lane without a model, and those who listen to a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from domino_spec.decoding import Commit, Row, SamplingParams, make_sampler
from domino_spec.decoding.stopping import at_length
from domino_spec.serving.asks import Ask, Block, Ended, Failed
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import Lane, Results

CPU = torch.device("cpu")


class ScriptedLane(Lane):
    """Every row commits one token a turn, its own number; what `trouble` raises is raised."""

    def __init__(self, slots=2, trouble: Callable[[Lane], None] = lambda lane: None):
        super().__init__()
        self.slots = slots
        self.trouble = trouble
        self.turns = 0
        self.resets = 0
        self.gate = threading.Semaphore(0)
        self.gated = False
        self.began: list[int] = []

    def turn(self, results: Results) -> None:
        if self.gated:
            self.gate.acquire()
        self.turns += 1
        self.trouble(self)
        for job in self.jobs():
            try:
                taken = job.row.take([job.row.index])
            except Exception as error:
                results.failures.append((job, error))
                self.release(job)
                continue
            cycle = len(job.row.generated) - 1
            if cycle:
                job.row.stats.record(drafts=2, accepted=0, committed=1)
            reason = job.row.finish_reason
            results.commits.append((job, Commit(job.row.index, taken, 0, cycle, reason)))
            if reason is not None:
                self.release(job)

    def reset(self) -> None:
        self.resets += 1
        for job in self.jobs():
            self.release(job)

    def _begin(self, job: Job) -> None:
        self.began.append(job.row.index)

    def _release(self, job: Job) -> None: ...


class Listener:
    """Keeps a job's events; `done` is set at its end."""

    def __init__(self):
        self.events = []
        self.done = threading.Event()
        self.first = threading.Event()

    def __call__(self, event):
        self.events.append(event)
        self.first.set()
        if not isinstance(event, Block):
            self.done.set()

    @property
    def tokens(self):
        blocks = [event for event in self.events if isinstance(event, Block)]
        return [token for block in blocks for token in block.commit.tokens]

    @property
    def end(self):
        assert self.done.wait(30)
        last = self.events[-1]
        assert isinstance(last, Ended | Failed)
        return last


class Counts:
    """A meter that remembers."""

    def __init__(self):
        self.ends = []
        self.firsts = 0
        self.drafts = 0
        self.gauges = []

    def queue(self, *, waiting, running, slots):
        self.gauges.append((waiting, running, slots))

    def first_token(self, seconds):
        assert seconds >= 0
        self.firsts += 1

    def block(self, commit, *, drafts, seconds):
        self.drafts += drafts

    def ended(self, reason, *, seconds):
        self.ends.append(reason)


def job(index, *, tokens=4, client="somebody", speculate=True, prompt=(1, 2, 3), rules=()):
    """A job with a listener, which is returned beside it."""
    params = SamplingParams(max_new_tokens=tokens)
    row = Row(
        index, prompt, sampler=make_sampler(params, row=0, device=CPU),
        stop_rules=[*rules, at_length()], max_new_tokens=tokens, device=CPU,
    )  # fmt: skip
    listener = Listener()
    ask = Ask(prompt=tuple(prompt), params=params, speculate=speculate)
    return Job(ask, row, 0, client, listener), listener
