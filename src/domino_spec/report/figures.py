"""The charts of a run as plain data: SVG, PNG and the table beside each are made from the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from domino_spec.bench import PLAIN, CellSummary, RunSummary
from domino_spec.bench.statistics import Interval
from domino_spec.bench.summary import ALL
from domino_spec.bench.tables import plain_interval, times

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headings and rows."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One method's figure."""

    method: str
    found: Interval
    text: str


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars with intervals in groups, and a line where plain decoding stands."""

    slug: str
    title: str
    where: str
    """Temperature and rows at a time."""
    caption: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    reference: float = 1.0

    @property
    def longest(self) -> float:
        """The end of the scale."""
        ends = [bar.found.high or bar.found.value for _, bars in self.groups for bar in bars]
        return max([self.reference, *ends])

    def table(self) -> Table:
        """A row a bar."""
        return ("task", "method", "figure"), [
            (name, bar.method, bar.text) for name, bars in self.groups for bar in bars
        ]


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """A bar a method, made of parts."""

    slug: str
    title: str
    where: str
    """Temperature and rows at a time."""
    caption: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unit: str

    @property
    def longest(self) -> float:
        """The end of the scale."""
        return max(sum(values) for _, values in self.rows)

    def table(self) -> Table:
        """A row a method."""
        return ("method", *(f"{p}, {self.unit}" for p in self.parts), f"all, {self.unit}"), [
            (name, *(f"{v:.2f}" for v in values), f"{sum(values):.2f}")
            for name, values in self.rows
        ]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A line a method over a few points."""

    slug: str
    title: str
    where: str
    """Temperature and rows at a time."""
    caption: str
    x_label: str
    series: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    percent: bool = False
    """Whether values are shares from 0 to 1."""
    doubling: bool = False
    """Whether each step of the horizontal axis is twice the last."""

    @property
    def xs(self) -> list[float]:
        """Where there are points."""
        return sorted({x for _, points in self.series for x, _ in points})

    @property
    def highest(self) -> float:
        """The end of the scale."""
        return 1.0 if self.percent else max(y for _, points in self.series for _, y in points)

    def label(self, value: float) -> str:
        """A value in words."""
        return f"{value:.0%}" if self.percent else f"{value:,.4g}"

    def table(self) -> Table:
        """A row a method, a column a point."""
        return ("method", *(f"{x:g}" for x in self.xs)), [
            (name, *(self.label(dict(points)[x]) if x in dict(points) else "–" for x in self.xs))
            for name, points in self.series
        ]


Figure = Bars | Stacks | Lines


def figures(run: RunSummary) -> list[Figure]:
    """All charts that the run's records allow, by temperature."""
    found: list[Figure] = []
    for temperature in sorted({t for t, _ in run.points}):
        sizes = sorted(size for t, size in run.points if t == temperature)
        cells = [c for c in run.at(temperature, sizes[0]) if c.lines]
        if not cells:
            continue
        where = f"T {temperature:g}, {_rows(sizes[0])}"
        tag = f"t{temperature:g}".replace(".", "-")
        if len(run.methods) > 1:
            found += [_speed_ups(cells, where, tag), _tokens(cells, where, tag)]
        found += _acceptance(cells, where, tag) + _cycles(run, cells, where, tag)
        found += _throughput(run, temperature, sizes, tag)
    return found


def _speed_ups(cells: Sequence[CellSummary], where: str, tag: str) -> Bars:
    groups = [(c.cell.task, [_bar(li.method, li.speed_up, times(li.speed_up)) for li in c.lines])
              for c in cells]  # fmt: skip
    return Bars(
        slug=f"speed-up-{tag}",
        title="Speed-up over plain decoding",
        where=where,
        caption="Tokens a second over plain decoding's on the same path, from the prompt to the "
        "last token. The dashed line is plain decoding: a bar that ends before it is slower. "
        "Whiskers are 95% intervals.",
        groups=_drafting(groups),
    )


def _tokens(cells: Sequence[CellSummary], where: str, tag: str) -> Bars:
    groups = [
        (c.cell.task, [_bar(li.method, li.tokens_per_cycle, plain_interval(li.tokens_per_cycle))
                       for li in c.lines])
        for c in cells
    ]  # fmt: skip
    return Bars(
        slug=f"tokens-per-cycle-{tag}",
        title="Tokens a cycle",
        where=where,
        caption="Accepted drafts and the target's own token, over all cycles; the prefill's token "
        "is in none. The dashed line is plain decoding's one.",
        groups=_drafting(groups),
    )


def _bar(method: str, found: Interval, text: str) -> Bar:
    return Bar(method=method, found=found, text=text)


def _drafting(
    groups: Sequence[tuple[str, Sequence[Bar]]],
) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    """Without plain decoding, which is the line."""
    return tuple((name, tuple(b for b in bars if b.method != PLAIN)) for name, bars in groups)


def _acceptance(cells: Sequence[CellSummary], where: str, tag: str) -> list[Figure]:
    whole = _whole(cells)
    series = [
        (line.method, tuple((float(i), share) for i, share in enumerate(shares, start=1)))
        for line in whole.lines
        if (shares := line.counts.acceptance_by_position)
    ]
    if not series:
        return []
    return [
        Lines(
            slug=f"acceptance-{tag}",
            title="Drafts accepted by position",
            where=where,
            caption=f"Of the drafts verified at each position of a block, how many were accepted "
            f"({whole.cell.task}). A draft counts only if all before it were accepted.",
            x_label="position in the block",
            series=tuple(series),
            percent=True,
        )
    ]


def _cycles(run: RunSummary, cells: Sequence[CellSummary], where: str, tag: str) -> list[Figure]:
    whole = _whole(cells)
    rows = [
        (line.method, (line.cycle.draft, line.cycle.verify, line.cycle.other))
        for line in whole.lines
        if line.cycle is not None
    ]
    if not rows:
        return []
    how = (
        "Draft and verify were timed alone on the idle engine, greedily, with "
        f"{run.stage_context} tokens in the cache; the rest is what the clock had more."
        if run.stage_context is not None
        else "Each part was timed inside the runs."
    )
    return [
        Stacks(
            slug=f"cycle-{tag}",
            title="Where a cycle's time goes",
            where=where,
            caption=f"Milliseconds of an average cycle, {whole.cell.task}. Plain decoding's cycle "
            f"gives one token, a drafter's gives as many as the chart of tokens says. {how}",
            parts=("draft", "verify", "other"),
            rows=tuple(rows),
            unit="ms",
        )
    ]


def _throughput(
    run: RunSummary, temperature: float, sizes: Sequence[int], tag: str
) -> list[Figure]:
    if len(sizes) < 2:
        return []
    series = []
    for method in run.methods:
        points = []
        for size in sizes:
            cells = [c for c in run.at(temperature, size) if c.lines]
            if cells:
                speed = _whole(cells).line(method).tokens_per_second
                points.append((float(size), speed))
        series.append((method, tuple(points)))
    return [
        Lines(
            slug=f"throughput-{tag}",
            title="Throughput by batch size",
            where=f"T {temperature:g}",
            caption="Tokens a second of all rows together, all tasks, prompts' reading included. "
            "A batch ends when its last row does.",
            x_label="rows at a time",
            series=tuple(series),
            doubling=True,
        )
    ]


def _whole(cells: Sequence[CellSummary]) -> CellSummary:
    """All tasks together, or the only one."""
    return next((c for c in cells if c.cell.task == ALL), cells[0])


def _rows(size: int) -> str:
    return "1 row" if size == 1 else f"{size} rows"
