"""A run's figures, made from its raw records and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError
from domino_spec.load import figures
from domino_spec.load.compare import Comparison, compare
from domino_spec.load.exchange import INTERRUPTED
from domino_spec.load.figures import Quantiles, Record
from domino_spec.load.settings import Cell, Goals
from domino_spec.records import read_records

TIMES = ("first_token", "token_time", "inter_token", "inter_chunk", "latency")


@dataclass(frozen=True, kw_only=True)
class SideSummary:
    """One side under one load."""

    name: str
    requests: int
    completed: int
    errors: Mapping[str, int]
    interrupted: int
    """Ended by us; neither completed nor failed."""
    seconds: float
    tokens: int
    tokens_from: str
    """usage, chunks (the server tells how many each holds) or guess (a token a chunk)."""
    prompt_tokens: int | None
    cached_tokens: int | None
    accepted: int | None
    """Tokens of the answers that were drafts."""
    full_tokens_per_second: float | None
    """While a closed loop had all places taken."""
    goodput: float | None
    """Answers a second that kept the goals; None without goals."""
    late: Quantiles | None
    """From when requests were due to when they were sent: the client's own part of latency."""
    client_busy: float
    """Share of a core that the client used, in its worst round."""
    times: Mapping[str, Quantiles | None]
    """By the names of `TIMES`, in seconds."""

    @property
    def requests_per_second(self) -> float:
        """Answers completed."""
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of completed answers, from the first request to the last answer's end."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            **asdict(self),
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class CellSummary:
    """One load on all sides; the ratio is the first side's over the second's."""

    cell: Cell
    sides: tuple[SideSummary, ...]
    comparison: Comparison | None

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        ratio = None if self.comparison is None else self.comparison.to_dict()
        sides = [side.to_dict() for side in self.sides]
        return {**self.cell.to_dict(), "sides": sides, "comparison": ratio}


@dataclass(frozen=True)
class RunSummary:
    """What was asked of whom, and every load."""

    facts: Record
    cells: tuple[CellSummary, ...]

    @property
    def completed(self) -> int:
        """Over everything; 0 means that the run says nothing but errors."""
        return sum(side.completed for cell in self.cells for side in cell.sides)

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"facts": dict(self.facts), "cells": [cell.to_dict() for cell in self.cells]}


def read_runs(path: str | Path) -> list[RunSummary]:
    """All runs of a file."""
    return summarise(read_records(path))


def summarise(records: Iterable[Record]) -> list[RunSummary]:
    """Every run among the records."""
    runs: dict[str, tuple[Record, list[Record]]] = {}
    for record in records:
        if record["kind"] == "run":
            runs[record["run"]] = (record, [])
        elif record["run"] in runs:
            runs[record["run"]][1].append(record)
        else:
            raise InputError(f"a {record['kind']} of run {record['run']} stands before its run.")
    return [_run(facts, lines) for facts, lines in runs.values()]


def _run(facts: Record, lines: Sequence[Record]) -> RunSummary:
    goals = Goals(**facts["settings"]["goals"])
    names = [side["name"] for side in facts["sides"]]
    cells: dict[Cell, list[Record]] = {}
    for line in lines:
        if not line["warm_up"]:
            cell = Cell(line["concurrency"], line["rate"])
            cells.setdefault(cell, []).append(line)
    summaries = []
    for cell, found in cells.items():
        by_side = {n: [line for line in found if line["side"] == n] for n in names}
        sides = tuple(_side(n, cell, each, goals) for n, each in by_side.items() if each)
        paired = len(names) == 2 and all(by_side.values())
        ratio = compare(cell, by_side[names[0]], by_side[names[1]]) if paired else None
        summaries.append(CellSummary(cell, sides, ratio))
    return RunSummary(facts, tuple(summaries))


def _side(name: str, cell: Cell, lines: Sequence[Record], goals: Goals) -> SideSummary:
    requests = [line for line in lines if line["kind"] == "request"]
    rounds = [line for line in lines if line["kind"] == "round"]
    good = [r for r in requests if r["error"] is None]
    # An answer that we cut off has no tokens to count, so its time does not count either.
    ended = [r for r in requests if r["error"] != INTERRUPTED]
    by_round = {e["round"]: [r for r in ended if r["round"] == e["round"]] for e in rounds}
    seconds = sum(figures.span(each, rate=cell.rate) for each in by_round.values())
    whole = [by_round[each["round"]] for each in rounds if each["complete"]]
    errors = Counter(r["error"] for r in requests if r["error"] is not None)
    interrupted = errors.pop(INTERRUPTED, 0)
    late = [r["sent"] - r["scheduled"] for r in requests if r["sent"] is not None]
    return SideSummary(
        name=name,
        requests=len(requests),
        completed=len(good),
        errors=dict(sorted(errors.items())),
        interrupted=interrupted,
        seconds=seconds,
        tokens=sum(map(figures.tokens, good)),
        tokens_from=_source(good),
        prompt_tokens=_total(good, "prompt_tokens"),
        cached_tokens=_total(good, "cached_tokens"),
        accepted=_total(good, "accepted"),
        full_tokens_per_second=_full(whole, cell.concurrency),
        goodput=sum(_keeps(r, goals) for r in good) / seconds if goals.any and seconds else None,
        late=Quantiles.of(late),
        client_busy=max((each["client_busy"] for each in rounds), default=0.0),
        times=_times(good),
    )


def _times(good: Sequence[Record]) -> dict[str, Quantiles | None]:
    first = [found for r in good if (found := figures.first_token(r)) is not None]
    token = [found for r in good if (found := figures.token_time(r)) is not None]
    values = (
        first,
        token,
        [gap for r in good for gap in figures.token_gaps(r)],
        [gap for r in good for gap in figures.chunk_gaps(r)],
        [figures.latency(r) for r in good],
    )
    return {name: Quantiles.of(found) for name, found in zip(TIMES, values, strict=True)}


def _full(rounds: Sequence[Sequence[Record]], concurrency: int | None) -> float | None:
    if concurrency is None:
        return None
    tokens = seconds = 0.0
    for requests in rounds:
        window = figures.full_window(requests, concurrency)
        if window is not None:
            seconds += window[1] - window[0]
            good = (r for r in requests if r["error"] is None)
            tokens += sum(figures.tokens_between(r, *window) for r in good)
    return tokens / seconds if tokens else None


def _keeps(record: Record, goals: Goals) -> bool:
    found = (figures.first_token(record), figures.token_time(record), figures.latency(record))
    asked = (goals.first_token, goals.token, goals.latency)
    return all(
        goal is None or value is None or value <= goal
        for value, goal in zip(found, asked, strict=True)
    )


def _source(good: Sequence[Record]) -> str:
    if all(r["tokens"] is not None for r in good):
        return "usage"
    told = all(r["tokens"] is not None or r["chunk_tokens"] is not None for r in good)
    return "chunks" if told else "guess"


def _total(good: Sequence[Record], name: str) -> int | None:
    """None where nobody tells: that is not 0."""
    found = [r[name] for r in good if r[name] is not None]
    return sum(found) if found else None
