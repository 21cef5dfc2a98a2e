"""A run's figures as rows of text, for terminals, Markdown and the results page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from domino_spec.bench.statistics import FEWEST, Interval
from domino_spec.bench.tables import circumstances, table, times
from domino_spec.load.figures import Quantiles
from domino_spec.load.summary import CellSummary, RunSummary, SideSummary

PACE_HEADS = ("load", "side", "answered", "errors", "requests/s", "tokens/s", "tokens/s, full",
              "drafts accepted", "prompt cached")  # fmt: skip
GOOD_HEAD = "good answers/s"
TIME_HEADS = ("load", "side", "ms", "samples", "mean", "p50", "p95", "p99", "largest")
RATIO_HEADS = ("load", "tokens/s", "requests/s", "first token", "per token", "whole answer",
               "same text")  # fmt: skip
TIME_WORDS = {
    "first_token": "first token",
    "token_time": "per token",
    "inter_token": "between tokens",
    "inter_chunk": "between chunks",
    "latency": "whole answer",
}
NONE = "–"
_BUSY_CLIENT = 0.8
_LATE_MS = 10.0


def markdown(run: RunSummary) -> str:
    """The whole run."""
    parts = [how_measured(run), circumstances(run.facts["environment"])]
    parts.append(table(pace_heads(run), pace_rows(run)))
    parts.append(table(TIME_HEADS, time_rows(run)))
    if any(cell.comparison for cell in run.cells):
        parts += [ratio_title(run), table(RATIO_HEADS, ratio_rows(run))]
    return "\n\n".join([*parts, *doubts(run)])


def how_measured(run: RunSummary) -> str:
    """In words, from the settings."""
    settings, sides = run.facts["settings"], run.facts["sides"]
    way = "streamed" if settings["stream"] else "not streamed"
    return (
        f"{'; '.join(_described(side) for side in sides)}. {run.facts['prompts']} prompts, "
        f"{settings['endpoint']} endpoint, {way}, up to {settings['max_tokens']} tokens at "
        f"temperature {settings['temperature']:g}; {settings['rounds']} round"
        f"{'s' if settings['rounds'] > 1 else ''} a load"
        f"{', sides in turns' if len(sides) > 1 else ''}. {_from_when(run)} p95 needs 20 samples, "
        "p99 100."
    )


def _from_when(run: RunSummary) -> str:
    if any(cell.cell.rate is not None for cell in run.cells):
        return "Times count from when a request was due, whether or not the client got to it."
    return "Times count from when a request was sent."


def _described(side: Mapping[str, Any]) -> str:
    server = side["server"]
    words = f"{side['name']}: {side['model']} at {side['url']}"
    if side["body"]:
        words += f" with `{json.dumps(side['body'], ensure_ascii=False)}`"
    if server:
        draft = server.get("draft") or "no drafter"
        words += f" (domino-spec {server.get('version')}, {draft}, {server.get('device')})"
    return words


def pace_heads(run: RunSummary) -> tuple[str, ...]:
    """With goodput only where goals were set."""
    return (*PACE_HEADS, GOOD_HEAD) if _has_goals(run) else PACE_HEADS


def pace_rows(run: RunSummary) -> list[list[str]]:
    """What went through."""
    rows = []
    for cell, side in _each(run):
        full = side.full_tokens_per_second
        row = [
            str(cell.cell),
            side.name,
            f"{side.completed} of {side.requests - side.interrupted}",
            errors(side),
            f"{side.requests_per_second:.2f}",
            f"{side.tokens_per_second:,.1f}",
            NONE if full is None else f"{full:,.1f}",
            _share(side.accepted, side.tokens),
            _share(side.cached_tokens, side.prompt_tokens),
        ]
        if _has_goals(run):
            row.append(NONE if side.goodput is None else f"{side.goodput:.2f}")
        rows.append(row)
    return rows


def time_rows(run: RunSummary) -> list[list[str]]:
    """What requests waited for, in milliseconds."""
    return [
        [str(cell.cell), side.name, TIME_WORDS[name], *quantiles(found)]
        for cell, side in _each(run)
        for name, found in side.times.items()
        if found is not None
    ]


def ratio_title(run: RunSummary) -> str:
    """Who is held against whom."""
    first, second = (side["name"] for side in run.facts["sides"])
    return f"{first} over {second} (95% by drawing rounds anew; {FEWEST} rounds or more)"


def ratio_rows(run: RunSummary) -> list[list[str]]:
    """The first side over the second."""
    rows = []
    for cell in run.cells:
        found = cell.comparison
        if found is None:
            continue
        ratios = (found.tokens_per_second, found.requests_per_second, found.first_token,
                  found.token_time, found.latency)  # fmt: skip
        same = f"{found.same} of {found.compared}" if found.compared else NONE
        rows.append([str(cell.cell), *map(ratio, ratios), same])
    return rows


def doubts(run: RunSummary) -> list[str]:
    """What makes figures less than they look."""
    said = []
    for cell, side in _each(run):
        where = f"{cell.cell}, {side.name}"
        if side.client_busy > _BUSY_CLIENT:
            said.append(
                f"{where}: the client itself used {side.client_busy:.0%} of a core; times may be "
                "its own, not the server's."
            )
        if side.late is not None and (side.late.p95 or side.late.largest) * 1e3 > _LATE_MS:
            said.append(f"{where}: requests were sent late, {_ms(side.late.mean)} ms on average.")
        if side.completed and side.tokens_from == "guess":
            said.append(f"{where}: the server does not count tokens; a chunk is taken for one.")
        if side.interrupted:
            said.append(
                f"{where}: {side.interrupted} requests were under way at the end; not counted."
            )
    chunked = any(
        side.times["inter_chunk"] is not None and side.times["inter_token"] is None
        for _, side in _each(run)
    )
    if chunked:
        said.append(
            "Servers that do not tell how many tokens a chunk holds have times between chunks "
            "only; per token is an answer's mean by its own count."
        )
    return said


def errors(side: SideSummary) -> str:
    """By class, the most first."""
    ordered = sorted(side.errors.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {name}" for name, count in ordered) or "0"


def quantiles(found: Quantiles) -> list[str]:
    """Samples, mean, p50, p95, p99, largest."""
    values = (found.mean, found.p50, found.p95, found.p99, found.largest)
    return [f"{found.samples:,}", *(NONE if value is None else _ms(value) for value in values)]


def ratio(found: Interval | None) -> str:
    """1.42× (1.36 to 1.48)."""
    return NONE if found is None else times(found)


def _each(run: RunSummary) -> list[tuple[CellSummary, SideSummary]]:
    return [(cell, side) for cell in run.cells for side in cell.sides]


def _has_goals(run: RunSummary) -> bool:
    return any(value is not None for value in run.facts["settings"]["goals"].values())


def _share(part: int | None, whole: int | None) -> str:
    return NONE if part is None or not whole else f"{part / whole:.0%}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}"
