"""The server's part of the results page: load from outside, with drafts and without."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import remarks, table
from domino_spec.bench.tables import circumstances
from domino_spec.load import CellSummary, RunSummary, SideSummary, read_runs
from domino_spec.load.tables import NONE, doubts, errors, how_measured, quantiles, ratio

FILE = "serving.jsonl"
"""What `domino bench serve --out` wrote."""
HEADS = ["load", "side", "tokens/s", "tokens/s, full", "over the other", "answered", "errors",
         "drafts accepted", "same text"]  # fmt: skip
TIME_HEADS = ["load", "side", "ms", "samples", "mean", "p50", "p95", "p99", "over the other"]
_REMARKS = {
    "79ae83f04cc7": (
        "On the H200 a batch of at most 16 tokens goes through kernels whose rounding does not "
        "depend on the batch, a larger one through the vendor's library, which rounds by shape. "
        "Alone both sides stay below; at 8 at once only the one without drafts does, and most "
        "texts part (the audits below judge such places one by one); at 32 neither does."
    )
}
"""What is to be said of runs at a commit; it goes when they are made again."""
_TIMES = {"first_token": "first token", "token_time": "per token", "inter_token": "between tokens",
          "inter_chunk": "between chunks"}  # fmt: skip


def serving(records: Path) -> str:
    """All runs on file; nothing where there are none."""
    path = records / FILE
    if not path.exists():
        return ""
    return "\n".join(
        [
            "## The server under load",
            "",
            "`domino bench serve` from another process ([how](bench.md#load-on-a-server)). "
            "*tokens/s* is from the first request to the end of the last answer, *full* while all "
            "places were taken; ratios are of one run, sides in turns, with 95% intervals by "
            "drawing rounds anew. *Per token* is an answer's mean after its first token.",
            "",
            *(line for run in read_runs(path) for line in _run(run)),
        ]
    )


def _run(run: RunSummary) -> list[str]:
    said = doubts(run)
    return [
        how_measured(run),
        "",
        circumstances(run.facts["environment"]),
        "",
        table(HEADS, [_pace(cell, side) for cell in run.cells for side in cell.sides]),
        "",
        table(TIME_HEADS, [row for cell in run.cells for row in _times(cell)]),
        "",
        *([" ".join(said), ""] if said else []),
        *remarks([run.facts["environment"]], _REMARKS),
    ]


def _pace(cell: CellSummary, side: SideSummary) -> list[str]:
    found = cell.comparison if side is cell.sides[0] else None
    full, accepted = side.full_tokens_per_second, side.accepted
    return [
        str(cell.cell),
        side.name,
        f"{side.tokens_per_second:,.1f}",
        NONE if full is None else f"{full:,.1f}",
        ratio(found.tokens_per_second) if found else NONE,
        f"{side.completed} of {side.requests - side.interrupted}",
        errors(side),
        NONE if accepted is None or not side.tokens else f"{accepted / side.tokens:.0%}",
        f"{found.same} of {found.compared}" if found and found.compared else NONE,
    ]


def _times(cell: CellSummary) -> list[list[str]]:
    rows = []
    for name, words in _TIMES.items():
        for side in cell.sides:
            found = side.times[name]
            if found is None:
                continue
            compared = cell.comparison if side is cell.sides[0] else None
            over = ratio(getattr(compared, name, None))
            rows.append([str(cell.cell), side.name, words, *quantiles(found)[:-1], over])
    return rows
