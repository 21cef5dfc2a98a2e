"""Where rows are decoded: an engine that takes them as they come, or the reference loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from domino_spec.api import DominoDecoder
from domino_spec.decoding import Commit, RunStats
from domino_spec.fast.admission import Admission
from domino_spec.fast.engine import Engine
from domino_spec.fast.seats import Turn
from domino_spec.serving.jobs import Job

_GPU_CHUNK, _CPU_CHUNK = 2048, 128
"""Prompt tokens read between two cycles: running answers wait for no longer than that takes."""


@dataclass
class Results:
    """What one turn brought."""

    commits: list[tuple[Job, Commit]] = field(default_factory=list)
    failures: list[tuple[Job, Exception]] = field(default_factory=list)


class Lane(ABC):
    """Rows that advance together. One thread, the worker's, calls it."""

    slots: int

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    @property
    def running(self) -> int:
        """Rows in slots."""
        return len(self._jobs)

    @property
    def free(self) -> int:
        """Slots without a row."""
        return self.slots - len(self._jobs)

    def jobs(self) -> Iterator[Job]:
        """Whose rows these are."""
        yield from list(self._jobs.values())

    def begin(self, job: Job) -> None:
        """Give a job a slot; its prompt is read in turns to come."""
        self._begin(job)
        self._jobs[job.row.index] = job

    def holds(self, job: Job) -> bool:
        """Whether the job has a slot here."""
        return job.row.index in self._jobs

    def release(self, job: Job) -> None:
        """Take a job out, at once, done or not."""
        if self._jobs.pop(job.row.index, None) is not None:
            self._release(job)

    @abstractmethod
    def turn(self, results: Results) -> None:
        """Read some of the waiting prompts and run one cycle.

        What happened before it raised is in the results all the same.
        """

    def settle(self, results: Results) -> None:  # noqa: B027 (where nothing is under way)
        """Wait for what is under way, so that the next to use the machine finds it idle."""

    @abstractmethod
    def reset(self) -> None:
        """After a turn that raised: empty slots, as new."""

    @abstractmethod
    def _begin(self, job: Job) -> None: ...

    @abstractmethod
    def _release(self, job: Job) -> None: ...


class EngineLane(Lane):
    """Rows of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.slots = engine.slots.count  # also while the engine makes its own anew
        self._unread: deque[Job] = deque()
        self._reading: Admission | None = None
        self._chunk = _GPU_CHUNK if engine.target.device.type == "cuda" else _CPU_CHUNK

    def turn(self, results: Results) -> None:
        """Prompts up to a chunk's length in all, then a cycle of those that have begun."""
        self._read_prompts(results)
        self._landed(self._engine.advance(), results)

    def settle(self, results: Results) -> None:
        """The report of a cycle that was started ahead."""
        self._landed(self._engine.land(), results)

    def _landed(self, turn: Turn, results: Results) -> None:
        for commit in turn.commits:
            self._committed(commit, results)
        for row, error in turn.failures:
            self._failed(self._jobs[row.index], error, results)

    def _read_prompts(self, results: Results) -> None:
        left = self._chunk
        while self._unread and left > 0:
            job = self._unread[0]
            try:
                admission = self._reading = self._reading or self._admitted(job)
                left -= min(self._chunk, admission.remaining)
                commit = admission.advance()
            except Exception as error:
                self._failed(job, error, results)
                continue
            if commit is not None:
                self._unread.popleft()
                self._reading = None
                self._committed(commit, results)

    def _admitted(self, job: Job) -> Admission:
        """Only now, not when it came: what it shares with the one before has been read by now."""
        row = job.row
        admission = self._engine.begin(
            row, job.ask.params, seed=row.sampler.seed, chunk=self._chunk
        )
        job.cached = admission.reused
        return admission

    def _committed(self, commit: Commit, results: Results) -> None:
        job = self._jobs[commit.row]
        results.commits.append((job, commit))
        if commit.finish_reason is not None:
            self.release(job)

    def _failed(self, job: Job, error: Exception, results: Results) -> None:
        results.failures.append((job, error))
        self.release(job)

    def reset(self) -> None:
        """The caches are made anew: nobody knows what the turn left in them."""
        self._jobs.clear()
        self._unread.clear()
        self._reading = None
        self._engine.restart()

    def _begin(self, job: Job) -> None:
        self._unread.append(job)

    def _release(self, job: Job) -> None:
        self._engine.release(job.row)
        if self._reading is not None and self._reading.row is job.row:
            self._reading = None
        with suppress(ValueError):  # it may have been read long ago
            self._unread.remove(job)


class ReferenceLane(Lane):
    """One row at a time through Transformers, for what the engine cannot run."""

    slots = 1

    def __init__(self, decoder: DominoDecoder, *, speculate: bool) -> None:
        super().__init__()
        self._decoder = decoder
        self._speculate = speculate
        self._commits: Generator[Commit, None, None] | None = None

    def turn(self, results: Results) -> None:
        """One cycle; the first is the prompt."""
        assert self._commits is not None
        (job,) = self._jobs.values()
        try:
            commit = next(self._commits)
        except Exception as error:
            results.failures.append((job, error))
            self.release(job)
            return
        results.commits.append((job, commit))
        if commit.finish_reason is not None:
            self.release(job)

    def reset(self) -> None:
        """Nothing outlives a row here."""
        for job in self.jobs():
            self.release(job)

    def _begin(self, job: Job) -> None:
        commits = self._decoder.run(
            [job.row], RunStats(), params=[job.ask.params], speculate=self._speculate
        )
        self._commits = cast("Generator[Commit, None, None]", commits)

    def _release(self, job: Job) -> None:  # noqa: ARG002
        commits, self._commits = self._commits, None
        if commits is not None:
            with suppress(Exception):  # it may be the very one that raised
                commits.close()
