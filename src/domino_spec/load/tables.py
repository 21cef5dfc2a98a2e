"""A run's figures as tables of text, for the terminal and the results page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domino_spec.bench.statistics import FEWEST, Interval
from domino_spec.bench.tables import times
from domino_spec.load.summary import CellSummary, Quantiles, RunSummary, SideSummary

METRIC_NAMES = {
    "first_token": "TTFT",
    "token_time": "TPOT",
    "inter_token": "ITL",
    "inter_chunk": "inter-chunk",
    "latency": "E2E latency",
}
TEXT_HEADS = ("load", "side", "ms", "errors")
"""Columns of words; the others hold numbers."""
NONE = "–"
_BUSY_CLIENT = 0.8
_LATE_MS = 10.0


@dataclass(frozen=True)
class Table:
    """A title, column heads and lines of cells."""

    title: str
    heads: list[str]
    lines: list[list[str]]


def tables(run: RunSummary) -> list[Table]:
    """Throughput, times, and ratios where two sides were compared."""
    each = _each(run)
    with_goals = any(goal is not None for goal in run.facts["settings"]["goals"].values())
    heads = ["load", "side", "completed", "errors", "requests/s", "tokens/s", "tokens/s, full",
             "drafts accepted", "prompt cached"]  # fmt: skip
    if with_goals:
        heads.append("goodput, req/s")
    throughput = [_throughput(cell, side)[: len(heads)] for cell, side in each]
    latencies = [
        [str(cell.cell), side.name, METRIC_NAMES[metric], *_quantiles(found)]
        for cell, side in each
        for metric, found in side.times.items()
        if found is not None
    ]
    time_heads = ["load", "side", "ms", "samples", "mean", "p50", "p95", "p99", "max"]
    found = [Table("Throughput", heads, throughput), Table("Times", time_heads, latencies)]
    if any(cell.comparison for cell in run.cells):
        first, second = (side["name"] for side in run.facts["sides"])
        title = f"{first} over {second} (95% bootstrap over rounds; {FEWEST} rounds or more)"
        ratio_heads = ["load", "tokens/s", "requests/s", "TTFT", "TPOT", "E2E latency", "same text"]
        found.append(Table(title, ratio_heads, [_ratios(c) for c in run.cells if c.comparison]))
    return found


def how_measured(run: RunSummary) -> str:
    """One paragraph, from the settings."""
    settings, sides = run.facts["settings"], run.facts["sides"]
    streamed = "streamed" if settings["stream"] else "not streamed"
    open_loop = any(cell.cell.rate is not None for cell in run.cells)
    return (
        f"{'; '.join(_described(side) for side in sides)}. {run.facts['prompts']} prompts, "
        f"{settings['endpoint']} endpoint, {streamed}, up to {settings['max_tokens']} tokens at "
        f"temperature {settings['temperature']:g}; {settings['rounds']} round"
        f"{'s' if settings['rounds'] > 1 else ''} per load"
        f"{', sides in turns' if len(sides) > 1 else ''}. Times count from when a request was "
        f"{'due, also where it was sent late' if open_loop else 'sent'}. p95 needs 20 samples, "
        "p99 100."
    )


def caveats(run: RunSummary) -> list[str]:
    """What limits the figures."""
    found, chunked = [], False
    for cell, side in _each(run):
        where = f"{cell.cell}, {side.name}"
        if side.client_busy > _BUSY_CLIENT:
            found.append(
                f"{where}: the client itself used {side.client_busy:.0%} of a core; times may be "
                "its own, not the server's."
            )
        if side.late is not None and (side.late.p95 or side.late.largest) * 1e3 > _LATE_MS:
            found.append(f"{where}: requests were sent late, {_ms(side.late.mean)} ms on average.")
        if side.completed and side.tokens_from == "guess":
            found.append(f"{where}: the server does not count tokens; a chunk counts as one.")
        if side.interrupted:
            found.append(
                f"{where}: {side.interrupted} requests were in flight at the end; not counted."
            )
        chunked |= side.times["inter_chunk"] is not None and side.times["inter_token"] is None
    if chunked:
        found.append(
            "Servers that do not tell how many tokens a chunk holds have no ITL, only times "
            "between chunks; TPOT is a response's mean by its usage."
        )
    return found


def _each(run: RunSummary) -> list[tuple[CellSummary, SideSummary]]:
    return [(cell, side) for cell in run.cells for side in cell.sides]


def _throughput(cell: CellSummary, side: SideSummary) -> list[str]:
    errors = sorted(side.errors.items(), key=lambda item: -item[1])
    full = side.full_tokens_per_second
    return [
        str(cell.cell),
        side.name,
        f"{side.completed} of {side.requests - side.interrupted}",
        ", ".join(f"{count} {name}" for name, count in errors) or "0",
        f"{side.requests_per_second:.2f}",
        f"{side.tokens_per_second:,.1f}",
        NONE if full is None else f"{full:,.1f}",
        _share(side.accepted, side.tokens),
        _share(side.cached_tokens, side.prompt_tokens),
        NONE if side.goodput is None else f"{side.goodput:.2f}",
    ]


def _quantiles(found: Quantiles) -> list[str]:
    values = (found.mean, found.p50, found.p95, found.p99, found.largest)
    return [f"{found.samples:,}", *(NONE if value is None else _ms(value) for value in values)]


def _ratios(cell: CellSummary) -> list[str]:
    found = cell.comparison
    assert found is not None
    ratios: tuple[Interval | None, ...] = (
        found.tokens_per_second, found.requests_per_second, found.first_token, found.token_time,
        found.latency,
    )  # fmt: skip
    same = f"{found.same} of {found.compared}" if found.compared else NONE
    return [str(cell.cell), *(NONE if r is None else times(r) for r in ratios), same]


def _described(side: Mapping[str, Any]) -> str:
    server = side["server"]
    words = f"{side['name']}: {side['model']} at {side['url']}"
    if side["body"]:
        words += f" with `{json.dumps(side['body'], ensure_ascii=False)}`"
    if server:
        draft = server.get("draft") or "no drafter"
        words += f" (domino-spec {server.get('version')}, {draft}, {server.get('device')})"
    return words


def _share(part: int | None, total: int | None) -> str:
    return NONE if part is None or not total else f"{part / total:.0%}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"
