"""The page: one HTML file that fetches and runs nothing; all text of records is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from domino_spec.bench import tables
from domino_spec.bench.statistics import FEWEST
from domino_spec.bench.summary import ALL, CellSummary, Line, RunSummary, read_runs
from domino_spec.bench.tables import times
from domino_spec.drafters import PLAIN
from domino_spec.errors import InputError
from domino_spec.report.charts import charts

_HERE = Path(__file__)
_MANY_LOOPS = 0.25
_VERDICTS = {1: "faster", -1: "slower", 0: "no clear difference"}


def write_report(
    records: Sequence[str | Path], out: Path, *, pictures: Path | None = None
) -> list[Path]:
    """Everything that was written, the page first."""
    runs = read_runs(records)
    text = page(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        written = [out]
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            for run in runs:
                prefix = f"{run.key[:8]}-" if len(runs) > 1 else ""
                for chart in charts(run):
                    written.append(pictures / f"{prefix}{chart.slug}.png")
                    chart.write_png(written[-1])
    except OSError as error:
        raise InputError(f"{error.filename or out} cannot be written: {error.strerror}.") from error
    return written


def page(runs: Sequence[RunSummary]) -> str:
    """All runs, one after the other."""
    names = ", ".join(dict.fromkeys(run.facts["target"]["name"] for run in runs))
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        _HERE.with_name("page.html").read_text(encoding="utf-8"),
        globals={**vars(tables), "charts": charts, "findings": findings, "caveats": caveats},
    )
    style = _HERE.with_name("page.css").read_text(encoding="utf-8")
    title = f"Head-to-head on {names}"
    return template.render(runs=runs, title=title, style=style) + "\n"


@dataclass(frozen=True)
class Finding:
    """One sentence about a method that claims no more than its intervals do."""

    method: str
    verdict: str
    rest: str
    kind: str
    """faster or slower where that holds for every batch size, else unclear."""


def findings(run: RunSummary) -> list[Finding]:
    """For each drafter at each temperature: over all tasks, at every batch size."""
    found = []
    for temperature in sorted({t for t, _ in run.points}):
        overall = []
        for size in (size for t, size in run.points if t == temperature):
            cells = [cell for cell in run.at(temperature, size) if cell.lines]
            overall += [c for c in cells if c.cell.task == ALL] or cells[:1]
        if overall:
            lines = (line for line in overall[0].lines if line.method != PLAIN)
            found += [_finding(overall, line) for line in lines]
    return found


def _finding(overall: Sequence[CellSummary], line: Line) -> Finding:
    cell = overall[0].cell
    pieces, verdicts = [], set()
    for each in overall:
        speedup = each.line(line.method).speed_up
        verdict = _VERDICTS[speedup.verdict] if speedup.low is not None else "no interval"
        verdicts.add(verdict)
        pieces.append(f"{verdict} at batch size {each.cell.batch_size}: {times(speedup)}")
    rest = (
        f"({cell.task}, T {cell.temperature:g}; acceptance length "
        f"{line.tokens_per_cycle.value:.2f} at batch size {cell.batch_size})"
    )
    if "no interval" in verdicts:
        rest += f". An interval takes {FEWEST} units of each task"
    kind = verdicts.pop() if len(verdicts) == 1 else "unclear"
    return Finding(line.method, "; ".join(pieces), rest,
                   kind if kind in ("faster", "slower") else "unclear")  # fmt: skip


def caveats(run: RunSummary) -> list[str]:
    """What limits the figures."""
    found = []
    lines = [line for cell in run.cells for line in cell.lines]
    for method in run.methods[1:]:
        compared = sum(line.compared for line in lines if line.method == method)
        same = sum(line.same for line in lines if line.method == method and line.compared)
        if compared > same:
            found.append(
                f"{compared - same} of {compared} answers of {method} differ from plain "
                "decoding's. In half precision near-ties round differently by the shape of a "
                "forward; in float32 on a CPU a difference would be a bug."
            )
    unsteady = {line.method for line in lines if not line.repeats_agree}
    found += [
        f"Repeats of {method} did not all give the same text."
        for method in run.methods
        if method in unsteady
    ]
    answered = sum(c.used + c.loops + c.short + c.left_over for c in run.cells)
    loops = sum(c.loops for c in run.cells)
    if loops > _MANY_LOOPS * answered:
        found.append(
            f"{loops} of {answered} plain answers were loops and were excluded: this target "
            "repeats itself often, and the rest says less about it."
        )
    empty = [str(c.cell) for c in run.cells if not c.lines]
    if empty:
        found.append(f"No prompt counts in: {'; '.join(empty)}.")
    if any("+changes" in e["commit"] for e in run.environments):
        found.append("The code had uncommitted changes.")
    if len(run.environments) > 1:
        found.append(f"The run was resumed: {len(run.environments)} sessions, listed below.")
    return found
