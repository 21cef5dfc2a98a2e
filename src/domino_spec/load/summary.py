"""Figures of a run, made from its raw records and from nothing else."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domino_spec.bench.statistics import Interval, interval, rate_ratio
from domino_spec.errors import InputError
from domino_spec.load.client import INTERRUPTED
from domino_spec.load.settings import Cell
from domino_spec.records import read_records

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """A distribution; a quantile is None where fewer than one sample is expected beyond it."""

    samples: int
    mean: float
    p50: float
    p95: float | None
    p99: float | None
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """None without samples."""
        if not values:
            return None
        found = np.asarray(values, dtype=np.float64)

        def at(share: float) -> float | None:
            enough = len(found) * (1 - share) > 1 - 1e-9
            return float(np.quantile(found, share)) if enough else None

        return cls(
            samples=len(found),
            mean=float(found.mean()),
            p50=float(np.median(found)),
            p95=at(0.95),
            p99=at(0.99),
            largest=float(found.max()),
        )


def tokens(record: Record) -> int:
    """By usage, else by the chunks' own counts, else one token per chunk."""
    if record["tokens"] is not None:
        return int(record["tokens"])
    return sum(record["chunk_tokens"] or [1] * len(_chunk_times(record)))


def ttft(record: Record) -> list[float]:
    """Time to the first token, from when the request was due."""
    return [] if record["first"] is None else [record["first"] - record["scheduled"]]


def tpot(record: Record) -> list[float]:
    """Mean time per output token after the first chunk; none where there was one chunk only."""
    if not record["gaps_us"]:
        return []
    rest = tokens(record) - (record["chunk_tokens"] or [1])[0]
    return [(record["last"] - record["first"]) / rest] if rest > 0 else []


def inter_chunk(record: Record) -> list[float]:
    """Gaps between chunks."""
    return [gap / 1e6 for gap in record["gaps_us"]]


def inter_token(record: Record) -> list[float]:
    """ITL: a chunk's gap divided among its tokens; none where the server does not count them."""
    counts = record["chunk_tokens"]
    if counts is None:
        return []
    gaps = zip(inter_chunk(record), counts[1:], strict=True)
    return [gap / count for gap, count in gaps for _ in range(count)]


def latency(record: Record) -> list[float]:
    """End to end, from when the request was due."""
    return [record["ended"] - record["scheduled"]]


METRICS: dict[str, Callable[[Record], list[float]]] = {
    "first_token": ttft,
    "token_time": tpot,
    "inter_token": inter_token,
    "inter_chunk": inter_chunk,
    "latency": latency,
}
"""By the names in summaries: a request's samples, in seconds."""
_GOALS = {"first_token": ttft, "token": tpot, "latency": latency}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ratios of the first side to the second; None where a side has nothing to compare.

    Intervals resample rounds, both sides of one together: requests of one round met the same load
    and are not independent.
    """

    rounds: int
    tokens_per_second: Interval | None
    requests_per_second: Interval | None
    first_token: Interval | None
    token_time: Interval | None
    latency: Interval | None
    same: int
    compared: int
    """Requests that both sides completed; `same` of them have the same text."""


@dataclass(frozen=True, kw_only=True)
class SideSummary:
    """One side under one load."""

    name: str
    requests: int
    completed: int
    errors: Mapping[str, int]
    interrupted: int
    """By the end of the run; neither completed nor failed."""
    seconds: float
    requests_per_second: float
    tokens: int
    tokens_per_second: float
    """Of completed requests, from the first request to the last response's end."""
    tokens_from: str
    """usage, chunks (the server counts each) or guess (one per chunk)."""
    prompt_tokens: int | None
    cached_tokens: int | None
    accepted: int | None
    """Output tokens that were accepted drafts."""
    full_tokens_per_second: float | None
    """While a closed loop was at its full concurrency."""
    goodput: float | None
    """Requests per second that met every goal; None without goals."""
    late: Quantiles | None
    """From when requests were due to when they were sent: the client's part of latency."""
    client_busy: float
    """Share of a core that the client used, in its worst round."""
    times: Mapping[str, Quantiles | None]
    """By the names of `METRICS`, in seconds."""


@dataclass(frozen=True)
class CellSummary:
    """One load on all sides."""

    cell: Cell
    sides: tuple[SideSummary, ...]
    comparison: Comparison | None


@dataclass(frozen=True)
class RunSummary:
    """What was measured, and every load."""

    facts: Record
    cells: tuple[CellSummary, ...]

    @property
    def completed(self) -> int:
        """Completed requests of all loads and sides."""
        return sum(side.completed for cell in self.cells for side in cell.sides)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        cells = [asdict(cell) for cell in self.cells]
        return {"facts": dict(self.facts), "cells": [{**c.pop("cell"), **c} for c in cells]}


def read_runs(path: str | Path) -> list[RunSummary]:
    """All runs of a file."""
    return summarise(read_records(path))


def summarise(records: Iterable[Record]) -> list[RunSummary]:
    """Every run among the records."""
    runs: dict[str, tuple[Record, list[Record]]] = {}
    for record in records:
        if record["kind"] == "run":
            if record["run"] in runs:
                raise InputError("the same run was given twice; name each file of records once.")
            runs[record["run"]] = (record, [])
        elif record["run"] in runs:
            runs[record["run"]][1].append(record)
        else:
            raise InputError(f"a {record['kind']} record comes before its run {record['run']}.")
    return [_summarise_run(facts, lines) for facts, lines in runs.values()]


def _summarise_run(facts: Record, lines: Sequence[Record]) -> RunSummary:
    goals = {name: goal for name, goal in facts["settings"]["goals"].items() if goal is not None}
    names = [side["name"] for side in facts["sides"]]
    cells: dict[Cell, dict[str, list[Record]]] = {}
    for line in lines:
        if not line["warm_up"]:
            cell = Cell(line["concurrency"], line["rate"])
            cells.setdefault(cell, {name: [] for name in names})[line["side"]].append(line)
    summaries = []
    for cell, by_side in cells.items():
        sides = [_side(name, cell, found, goals) for name, found in by_side.items() if found]
        paired = len(names) == 2 and len(sides) == 2
        compared = _compare(cell, *(by_side[name] for name in names)) if paired else None
        summaries.append(CellSummary(cell, tuple(sides), compared))
    return RunSummary(facts, tuple(summaries))


def _side(
    name: str, cell: Cell, lines: Sequence[Record], goals: Mapping[str, float]
) -> SideSummary:
    requests = [line for line in lines if line["kind"] == "request"]
    good = _completed(requests)
    # A request that was interrupted has no tokens to count, so its time does not count either.
    ended = [line for line in lines if line.get("error") != INTERRUPTED]
    seconds = sum(_span(each, cell) for each in _rounds(ended).values())
    errors = Counter(r["error"] for r in requests if r["error"] is not None)
    interrupted = errors.pop(INTERRUPTED, 0)
    met = sum(
        all(value <= goal for goal_name, goal in goals.items() for value in _GOALS[goal_name](r))
        for r in good
    )
    count = sum(map(tokens, good))

    def rate(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return SideSummary(
        name=name,
        requests=len(requests),
        completed=len(good),
        errors=dict(sorted(errors.items())),
        interrupted=interrupted,
        seconds=seconds,
        requests_per_second=rate(len(good)),
        tokens=count,
        tokens_per_second=rate(count),
        tokens_from=_token_source(good),
        prompt_tokens=_total(good, "prompt_tokens"),
        cached_tokens=_total(good, "cached_tokens"),
        accepted=_total(good, "accepted"),
        full_tokens_per_second=_full_rate(_rounds(ended, complete=True), cell.concurrency),
        goodput=rate(met) if goals and seconds else None,
        late=Quantiles.of([r["sent"] - r["scheduled"] for r in requests if r["sent"] is not None]),
        client_busy=max((line.get("client_busy", 0.0) for line in lines), default=0.0),
        times={
            metric: Quantiles.of([value for r in good for value in samples(r)])
            for metric, samples in METRICS.items()
        },
    )


def _compare(cell: Cell, first: Sequence[Record], second: Sequence[Record]) -> Comparison:
    """Over the rounds that both sides completed."""
    sides = [_rounds(first, complete=True), _rounds(second, complete=True)]
    pairs = [
        (sides[0][number], sides[1][number]) for number in sorted(sides[0].keys() & sides[1].keys())
    ]

    def ratio(amount: Callable[[list[Record]], tuple[float, float]]) -> Interval | None:
        table = [[*amount(one), *amount(other)] for one, other in pairs]
        sums = np.asarray(table, dtype=np.float64).reshape(-1, 4).sum(axis=0)
        if not (sums > 0).all():
            return None
        if not np.all(table):  # a sample of such rounds alone would be no ratio
            return Interval(float(rate_ratio(sums)))
        return interval(table, rate_ratio)

    def mean_ratio(metric: str) -> Interval | None:
        def amount(requests: list[Record]) -> tuple[float, float]:
            found = [value for r in _completed(requests) for value in METRICS[metric](r)]
            return sum(found), len(found)

        return ratio(amount)

    texts = []
    for pair in pairs:
        one, other = ({r["index"]: r["text_sha256"] for r in _completed(side)} for side in pair)
        texts += [(one[index], other[index]) for index in one.keys() & other.keys()]
    return Comparison(
        rounds=len(pairs),
        tokens_per_second=ratio(lambda r: (sum(map(tokens, _completed(r))), _span(r, cell))),
        requests_per_second=ratio(lambda r: (len(_completed(r)), _span(r, cell))),
        first_token=mean_ratio("first_token"),
        token_time=mean_ratio("token_time"),
        latency=mean_ratio("latency"),
        same=sum(one == other for one, other in texts),
        compared=len(texts),
    )


def _rounds(lines: Sequence[Record], *, complete: bool = False) -> dict[int, list[Record]]:
    """The requests of each round, or of each complete one."""
    rounds = [line for line in lines if line["kind"] == "round" and line["complete"] >= complete]
    requests = [line for line in lines if line["kind"] == "request"]
    return {e["round"]: [r for r in requests if r["round"] == e["round"]] for e in rounds}


def _completed(requests: Iterable[Record]) -> list[Record]:
    return [r for r in requests if r["error"] is None]


def _chunk_times(record: Record) -> list[float]:
    if record["first"] is None:
        return []
    return list(itertools.accumulate(inter_chunk(record), initial=record["first"]))


def _span(requests: Sequence[Record], cell: Cell) -> float:
    """Seconds of a round: an open loop begins with its clock, a closed one with a request."""
    if not requests:
        return 0.0
    begin = 0.0 if cell.rate is not None else min(r["scheduled"] for r in requests)
    return float(max(r["ended"] for r in requests) - begin)


def _full_window(requests: Sequence[Record], concurrency: int) -> tuple[float, float] | None:
    """When a closed loop was at full concurrency: after its ramp-up, before its ramp-down."""
    sent = sorted(r["sent"] for r in requests if r["sent"] is not None)
    if len(sent) < concurrency:
        return None
    begin = sent[concurrency - 1]
    end = min((r["ended"] for r in requests if r["ended"] > sent[-1]), default=sent[-1])
    return (begin, end) if end > begin else None


def _full_rate(rounds: Mapping[int, list[Record]], concurrency: int | None) -> float | None:
    amount = seconds = 0.0
    for requests in rounds.values():
        window = _full_window(requests, concurrency) if concurrency is not None else None
        if window is not None:
            seconds += window[1] - window[0]
            amount += sum(_tokens_between(r, *window) for r in _completed(requests))
    return amount / seconds if amount else None


def _tokens_between(record: Record, begin: float, end: float) -> float:
    """Tokens that arrived in a window; without counts per chunk, all chunks have equal shares."""
    times = _chunk_times(record)
    shares = record["chunk_tokens"] or [tokens(record) / len(times) for _ in times]
    end += 0.5e-6  # times are recorded to the microsecond, their sums not quite
    return math.fsum(share for at, share in zip(times, shares, strict=True) if begin < at <= end)


def _token_source(good: Sequence[Record]) -> str:
    if all(r["tokens"] is not None for r in good):
        return "usage"
    counted = all(r["tokens"] is not None or r["chunk_tokens"] is not None for r in good)
    return "chunks" if counted else "guess"


def _total(good: Sequence[Record], name: str) -> int | None:
    """None where no response tells, which is not 0."""
    found = [r[name] for r in good if r[name] is not None]
    return sum(found) if found else None
