"""The server's part of the results page: load from outside, with drafts and without."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables import remarks, table
from domino_spec.bench.tables import circumstances
from domino_spec.load.summary import RunSummary, read_runs
from domino_spec.load.tables import caveats, how_measured, tables

FILE = "serving.jsonl"
"""What `domino bench serve --out` wrote."""
_REMARKS = {
    "79ae83f04cc7": (
        "On the H200 a batch of at most 16 tokens goes through kernels whose rounding does not "
        "depend on the batch, a larger one through the vendor's library, which rounds by shape. "
        "At concurrency 1 both sides stay below; at 8 only the one without drafts does, and most "
        "texts differ (the audits below judge such places one by one); at 32 neither does."
    )
}
"""Remarks on the runs of a commit; to be removed when they are measured again."""


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
            "*tokens/s* is from the first request to the end of the last response, *full* while a "
            "closed loop was at its full concurrency; ratios are of one run, sides in turns, with "
            "95% bootstrap intervals over rounds.",
            "",
            *(line for run in read_runs(path) for line in _run(run)),
        ]
    )


def _run(run: RunSummary) -> list[str]:
    limits = caveats(run)
    shown = [
        line for t in tables(run) for line in (f"*{t.title}*", "", table(t.heads, t.lines), "")
    ]
    return [
        how_measured(run),
        "",
        circumstances(run.facts["environment"]),
        "",
        *shown,
        *([" ".join(limits), ""] if limits else []),
        *remarks([run.facts["environment"]], _REMARKS),
    ]
