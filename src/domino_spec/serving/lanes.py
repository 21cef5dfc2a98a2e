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
from domino_spec.serving.jobs import Job

_GPU_CHUNK, _CPU_CHUNK = 2048, 256
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

    def release(self, job: Job) -> None:
        """Take a job out, at once, done or not."""
        if self._jobs.pop(job.row.index, None) is not None:
            self._release(job)

    @abstractmethod
    def turn(self) -> Results:
        """Read some of the waiting prompts and run one cycle."""

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
        self._admissions: deque[Admission] = deque()
        self._chunk = _GPU_CHUNK if engine.target.device.type == "cuda" else _CPU_CHUNK

    @property
    def slots(self) -> int:  # type: ignore[override]
        """As many as the engine has."""
        return self._engine.slots.count

    def turn(self) -> Results:
        """Prompts up to a chunk's length in all, then a cycle of those that have begun."""
        results = Results()
        self._read_prompts(results)
        turn = self._engine.advance()
        for commit in turn.commits:
            self._committed(commit, results)
        for row, error in turn.failures:
            self._failed(row.index, error, results)
        return results

    def _read_prompts(self, results: Results) -> None:
        left = self._chunk
        while self._admissions and left > 0:
            admission = self._admissions[0]
            left -= max(1, min(self._chunk, admission.remaining))
            try:
                commit = admission.advance()
            except Exception as error:
                self._admissions.popleft()
                self._failed(admission.row.index, error, results)
                continue
            if commit is not None:
                self._admissions.popleft()
                self._committed(commit, results)

    def _committed(self, commit: Commit, results: Results) -> None:
        job = self._jobs[commit.row]
        results.commits.append((job, commit))
        if commit.finish_reason is not None:
            self.release(job)

    def _failed(self, index: int, error: Exception, results: Results) -> None:
        job = self._jobs[index]
        results.failures.append((job, error))
        self.release(job)

    def reset(self) -> None:
        """The caches are made anew: nobody knows what the turn left in them."""
        self._jobs.clear()
        self._admissions.clear()
        self._engine.restart()

    def _begin(self, job: Job) -> None:
        row = job.row
        admission = self._engine.begin(
            row,
            job.ask.params,
            seed=row.sampler.seed,
            chunk=self._chunk,
            reuse=job.ask.reuse,
        )
        job.cached = admission.reused
        self._admissions.append(admission)

    def _release(self, job: Job) -> None:
        self._engine.release(job.row)
        for admission in self._admissions:
            if admission.row is job.row:
                self._admissions.remove(admission)
                break


class ReferenceLane(Lane):
    """One row at a time through Transformers, for what the engine cannot run."""

    slots = 1

    def __init__(self, decoder: DominoDecoder, *, speculate: bool) -> None:
        super().__init__()
        self._decoder = decoder
        self._speculate = speculate
        self._commits: Generator[Commit, None, None] | None = None

    def turn(self) -> Results:
        """One cycle; the first is the prompt."""
        results = Results()
        assert self._commits is not None
        (job,) = self._jobs.values()
        try:
            commit = next(self._commits)
        except Exception as error:
            results.failures.append((job, error))
            self.release(job)
            return results
        results.commits.append((job, commit))
        if commit.finish_reason is not None:
            self.release(job)
        return results

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
