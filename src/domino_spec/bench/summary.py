"""From raw records to figures: the only place where tables, pages and pictures get them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.bench.journal import CELL, RUN, STAGES, UNIT
from domino_spec.bench.settings import LLAMA_CPP, Cell
from domino_spec.bench.statistics import (
    Interval,
    arithmetic_mean,
    geometric_mean,
    rate_ratio,
    ratio,
)
from domino_spec.decoding import AcceptanceStats
from domino_spec.drafters import PLAIN
from domino_spec.errors import InputError
from domino_spec.records import read_records

ALL = "all tasks"


@dataclass(frozen=True, kw_only=True)
class CycleTime:
    """Milliseconds of a cycle of the whole batch, without the prefill."""

    draft: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.other


@dataclass(frozen=True, kw_only=True)
class Line:
    """One method in one cell, or over all tasks of a temperature and batch size."""

    method: str
    speed_up: Interval
    """Tokens a second over plain decoding's, the prompt's reading included."""
    decoding_speed_up: Interval
    """The same without the prompt's reading."""
    tokens_per_cycle: Interval
    tokens_per_second: float
    counts: AcceptanceStats
    cycle: CycleTime | None
    """None where a cycle's parts were not timed."""
    same: int
    """Answers that are plain decoding's to the token ..."""
    compared: int
    """... of so many that could be compared."""
    repeats_agree: bool
    peak_memory: int | None
    over: Mapping[str, tuple[Interval, Interval]]
    """A method of ours: speedup and decode speedup over each other implementation."""


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """A cell, or all tasks together, and what every method reached there."""

    cell: Cell
    units: int
    used: int
    loops: int
    short: int
    too_long: int
    left_over: int
    lines: tuple[Line, ...]
    """Plain decoding first; none where no prompt counts."""

    def line(self, method: str) -> Line:
        """One method's."""
        return next(line for line in self.lines if line.method == method)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A run: one target, one path, one machine."""

    key: str
    facts: Mapping[str, Any]
    environments: tuple[Mapping[str, Any], ...]
    """Different ones only where a run was continued."""
    cells: tuple[CellSummary, ...]
    overall: tuple[CellSummary, ...]
    """For each temperature and batch size with several tasks."""
    stage_context: int | None
    """Where parts of a cycle were timed apart: with so many tokens in the cache."""

    @property
    def methods(self) -> list[str]:
        """Names, plain decoding's first."""
        return [method["name"] for method in self.facts["methods"]]

    @property
    def settings(self) -> Mapping[str, Any]:
        """How everything was measured."""
        settings: Mapping[str, Any] = self.facts["settings"]
        return settings

    @property
    def points(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes that were measured."""
        return sorted({(c.cell.temperature, c.cell.batch_size) for c in self.cells})

    def at(self, temperature: float, batch_size: int) -> list[CellSummary]:
        """The tasks' cells in order, then all together where there are several."""
        return [
            summary
            for summary in (*self.cells, *self.overall)
            if (summary.cell.temperature, summary.cell.batch_size) == (temperature, batch_size)
        ]


def read_runs(paths: Sequence[str | Path]) -> list[RunSummary]:
    """All runs of some files of records."""
    records: list[dict[str, Any]] = []
    for path in paths:
        found = read_records(path)
        if not found or not all(isinstance(r, dict) and "record" in r for r in found):
            raise InputError(f"{path} holds no records of domino bench; expected a file it wrote.")
        records += found
    return summarise(records)


def summarise(records: Sequence[Mapping[str, Any]]) -> list[RunSummary]:
    """Each run by itself, in the order of the records."""
    heads: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record["record"] == RUN:
            if record["key"] in heads:
                raise InputError("the same run was given twice; name each file of records once.")
            heads[record["key"]] = record
    lost = {record["key"] for record in records} - set(heads)
    if lost:
        raise InputError(
            f"records of the run {sorted(lost)[0][:12]} came without its first line; expected the "
            "whole file."
        )
    return [
        _run(head, [record for record in records if record["key"] == key])
        for key, head in heads.items()
    ]


def _run(head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> RunSummary:
    stages = {r["batch_size"]: r for r in records if r["record"] == STAGES}
    found = [r for r in records if r["record"] == CELL]
    others = [m["name"] for m in head["facts"]["methods"] if m["kind"] == LLAMA_CPP]
    cells, tables = [], {}
    for record in found:
        cell = Cell(**record["cell"])
        units = [r for r in records if r["record"] == UNIT and r["cell"] == record["cell"]]
        apart = stages.get(cell.batch_size, {}).get("methods", {})
        tables[cell] = units
        names = [method["name"] for method in head["facts"]["methods"]] if units else []
        lines = tuple(_line(name, [units], apart.get(name), others) for name in names)
        counted = {"used": sum(len(unit["prompts"]) for unit in units)}
        left_out = {n: record[n] for n in ("loops", "short", "too_long", "left_over")}
        cells.append(CellSummary(cell=cell, units=len(units), lines=lines, **counted, **left_out))
    environments = {str(r["environment"]): r["environment"] for r in records}
    return RunSummary(
        key=head["key"],
        facts=head["facts"],
        environments=tuple(environments.values()),
        cells=tuple(cells),
        overall=tuple(_together(cells, tables, stages, others)),
        stage_context=next((s["context"] for s in stages.values()), None),
    )


def _together(
    cells: Sequence[CellSummary],
    tables: Mapping[Cell, Sequence[Mapping[str, Any]]],
    stages: Mapping[int, Mapping[str, Any]],
    others: Sequence[str],
) -> list[CellSummary]:
    """All tasks of a temperature and batch size, each task counting the same."""
    points = sorted({(c.cell.temperature, c.cell.batch_size) for c in cells})
    found = []
    for temperature, batch_size in points:
        here = [
            c for c in cells
            if (c.cell.temperature, c.cell.batch_size) == (temperature, batch_size) and c.lines
        ]  # fmt: skip
        if len(here) < 2:
            continue
        apart = stages.get(batch_size, {}).get("methods", {})
        names = [line.method for line in here[0].lines]
        units = [tables[c.cell] for c in here]
        found.append(
            CellSummary(
                cell=Cell(ALL, temperature, batch_size),
                lines=tuple(_line(name, units, apart.get(name), others) for name in names),
                **{
                    name: sum(getattr(c, name) for c in here)
                    for name in ("units", "used", "loops", "short", "too_long", "left_over")
                },
            )
        )
    return found


def _line(
    name: str,
    tasks: Sequence[Sequence[Mapping[str, Any]]],
    apart: Mapping[str, float] | None,
    others: Sequence[str],
) -> Line:
    """A method's figures over one task's units, or over several tasks'."""
    units = [unit for task in tasks for unit in task]
    mine = [unit["methods"][name] for unit in units]
    rows = [row for each in mine for row in each["rows"]]
    peaks = [each["peak_memory"] for each in mine if each["peak_memory"] is not None]
    compared = [row for row in rows if row["compared"] and name != PLAIN]

    def speedup(base: str, *, prefill: bool) -> Interval:
        tables = [[_speeds(unit, name, base, prefill=prefill) for unit in task] for task in tasks]
        return geometric_mean(tables, rate_ratio)

    per_cycle = [[_committed(unit["methods"][name]) for unit in task] for task in tasks]
    return Line(
        method=name,
        speed_up=speedup(PLAIN, prefill=True),
        decoding_speed_up=speedup(PLAIN, prefill=False),
        tokens_per_cycle=arithmetic_mean(per_cycle, ratio),
        tokens_per_second=sum(row["tokens"] for row in rows)
        / sum(statistics.median(each["seconds"]) for each in mine),
        counts=_counts(rows),
        cycle=_cycle_time(mine, apart),
        same=sum(row["differs_at"] is None for row in compared),
        compared=len(compared),
        repeats_agree=all(each["repeats_agree"] for each in mine),
        peak_memory=max(peaks, default=None),
        over={
            other: (speedup(other, prefill=True), speedup(other, prefill=False))
            for other in (others if name not in others else ())
        },
    )


def _speeds(unit: Mapping[str, Any], name: str, base: str, *, prefill: bool) -> list[float]:
    """A unit's tokens and median seconds, the method's and those of what it is compared with."""
    columns = []
    for method in (name, base):
        found = unit["methods"][method]
        tokens = sum(row["tokens"] if prefill else row["committed"] for row in found["rows"])
        seconds = found["seconds"]
        if not prefill:
            seconds = [a - b for a, b in zip(seconds, found["prefill"], strict=True)]
        columns += [float(tokens), statistics.median(seconds)]
    return columns


def _committed(found: Mapping[str, Any]) -> list[float]:
    rows = found["rows"]
    return [float(sum(row["committed"] for row in rows)), float(sum(r["cycles"] for r in rows))]


def _counts(rows: Sequence[Mapping[str, Any]]) -> AcceptanceStats:
    total = AcceptanceStats()
    for row in rows:
        names = ("cycles", "committed", "offered", "accepted")
        total.add(AcceptanceStats(**{name: row[name] for name in names}))
    return total


def _cycle_time(
    mine: Sequence[Mapping[str, Any]], apart: Mapping[str, float] | None
) -> CycleTime | None:
    """Of an average cycle. What is neither draft nor verify is what is left of the clock's time."""
    cycles = sum(each["cycles"] for each in mine)
    if not cycles:
        return None

    def seconds(name: str) -> float:
        return float(sum(statistics.median(each[name]) for each in mine))

    whole = (seconds("seconds") - seconds("prefill")) / cycles
    if apart is not None:
        draft, verify = apart["draft"], apart["verify"]
    elif all(each["draft"] is not None for each in mine):
        draft, verify = seconds("draft") / cycles, seconds("verify") / cycles
    else:
        return None
    other = max(whole - draft - verify, 0.0)
    return CycleTime(draft=draft * 1e3, verify=verify * 1e3, other=other * 1e3)
