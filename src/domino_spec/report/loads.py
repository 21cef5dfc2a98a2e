"""A load test in charts and findings: all sides of a run in one view."""

from __future__ import annotations

from functools import partial

from domino_spec.bench.statistics import FEWEST
from domino_spec.bench.tables import times
from domino_spec.load.summary import CellSummary, RunSummary, SideSummary
from domino_spec.report.charts import Chart, line_charts
from domino_spec.report.findings import Finding, verdict_of

_SIDES = (1, 0, 2, 3, 4, 5, 6, 7)
"""Colours; the second side is what the first is compared with, as plain decoding is."""
_QUANTILES = {"p50": 1, "p95": 2}
"""Dashes."""


def load_charts(run: RunSummary) -> list[Chart]:
    """Throughput and latencies over concurrency, over the request rate, or both."""
    closed = {c.cell.concurrency: c for c in run.cells if c.cell.concurrency is not None}
    opened = {c.cell.rate: c for c in run.cells if c.cell.rate is not None}
    return [
        *_charts(run, {float(x): c for x, c in closed.items()}, "concurrency"),
        *_charts(run, dict(opened), "request rate"),
    ]


def _charts(run: RunSummary, cells: dict[float, CellSummary], over: str) -> list[Chart]:
    cells = dict(sorted(cells.items()))
    names = [side["name"] for side in run.facts["sides"]]
    settings = run.facts["settings"]
    tag = over.replace(" ", "-")
    x_label = "requests in flight" if over == "concurrency" else "requests per second"
    draw = partial(
        line_charts, x_label=x_label, first_head="side",
        where=f"T {settings['temperature']:g}, up to {settings['max_tokens']} tokens",
    )  # fmt: skip
    colours = {name: _SIDES[i % len(_SIDES)] for i, name in enumerate(names)}
    sides: dict[str, dict[float, SideSummary]] = {
        name: {x: s for x, c in cells.items() for s in c.sides if s.name == name and s.completed}
        for name in names
    }
    found = draw(
        {name: {x: s.tokens_per_second for x, s in at.items()} for name, at in sides.items()},
        styles={name: (colours[name], 1, i) for i, name in enumerate(names)},
        slug=f"load-throughput-{tag}", title=f"Throughput by {over}",
        caption="Output tokens per second of all requests together, from the first request to the "
        "end of the last response.",
    )  # fmt: skip
    styles = {
        f"{name}, {quantile}": (colours[name], dashes, i)
        for i, name in enumerate(names)
        for quantile, dashes in _QUANTILES.items()
    }
    for metric, slug, title, caption in _latencies(list(cells.values())):
        lines: dict[str, dict[float, float]] = {key: {} for key in styles}
        for name, at in sides.items():
            for x, side in at.items():
                spread = side.times[metric]
                for quantile in _QUANTILES:
                    value = None if spread is None else getattr(spread, quantile)
                    if value is not None:
                        lines[f"{name}, {quantile}"][x] = value * 1e3
        found += draw(
            lines, styles=styles, slug=f"load-{slug}-{tag}", title=f"{title} by {over}",
            caption=f"Milliseconds, lower is better. {caption} p95 takes 20 samples.",
        )  # fmt: skip
    return found


def _latencies(cells: list[CellSummary]) -> list[tuple[str, str, str, str]]:
    """Metric, slug, title and caption; gaps between tokens only where every server counts them."""
    first = ("first_token", "ttft", "Time to first token",
             "From when a request was due to its first chunk.")  # fmt: skip
    counted = [s.times["inter_token"] is not None for c in cells for s in c.sides if s.completed]
    if counted and all(counted):
        return [first, ("inter_token", "itl", "Inter-token latency",
                        "A chunk's gap is divided among its tokens.")]  # fmt: skip
    return [first, ("token_time", "tpot", "Time per output token",
                    "A response's mean after its first chunk: not every server here tells how many "
                    "tokens a chunk holds, which single gaps would need.")]  # fmt: skip


def load_findings(run: RunSummary) -> list[Finding]:
    """One sentence about the first side against the second, over all loads."""
    compared = [(c, c.comparison.tokens_per_second) for c in run.cells if c.comparison is not None]
    ratios = [(cell, ratio) for cell, ratio in compared if ratio is not None]
    if not ratios:
        return []
    first, second = (side["name"] for side in run.facts["sides"])
    verdicts = [verdict_of(ratio) for _, ratio in ratios]
    pieces = (
        f"{verdict} at {cell.cell}: {times(ratio)}"
        for verdict, (cell, ratio) in zip(verdicts, ratios, strict=True)
    )
    rest = f"(tokens per second over {second}'s)"
    if any(ratio.low is None for _, ratio in ratios):
        rest += f". An interval takes {FEWEST} rounds"
    return [Finding.of(first, verdicts, "; ".join(pieces), rest)]
