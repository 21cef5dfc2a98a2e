"""The page: one HTML file that fetches and runs nothing; all text of records is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from domino_spec.bench import tables
from domino_spec.bench.settings import LLAMA_CPP
from domino_spec.bench.statistics import FEWEST
from domino_spec.bench.summary import ALL, CellSummary, Line, RunSummary, summarise
from domino_spec.bench.tables import times
from domino_spec.drafters import PLAIN
from domino_spec.errors import InputError
from domino_spec.load import tables as load_tables
from domino_spec.load.summary import RunSummary as LoadSummary
from domino_spec.load.summary import summarise as summarise_loads
from domino_spec.records import read_records
from domino_spec.report.charts import charts
from domino_spec.report.findings import Finding, verdict_of
from domino_spec.report.loads import load_charts, load_findings

_HERE = Path(__file__)
_MANY_LOOPS = 0.25


def write_report(
    records: Sequence[str | Path], out: Path, *, pictures: Path | None = None
) -> list[Path]:
    """Everything that was written, the page first."""
    runs, loads = read_files(records)
    text = page(runs, loads)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        written = [out]
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            drawn = [(run.key, charts(run)) for run in runs]
            drawn += [(load.facts["run"], load_charts(load)) for load in loads]
            for key, found in drawn:
                prefix = f"{key[:8]}-" if len(drawn) > 1 else ""
                for chart in found:
                    written.append(pictures / f"{prefix}{chart.slug}.png")
                    chart.write_png(written[-1])
    except OSError as error:
        raise InputError(f"{error.filename or out} cannot be written: {error.strerror}.") from error
    return written


def read_files(paths: Sequence[str | Path]) -> tuple[list[RunSummary], list[LoadSummary]]:
    """Head-to-heads and load tests of some files, each file of one kind."""
    runs: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    for path in paths:
        found = read_records(path)
        if found and all(isinstance(r, dict) and {"kind", "run"} <= r.keys() for r in found):
            loads += found
        elif found and all(isinstance(r, dict) and "record" in r for r in found):
            runs += found
        else:
            raise InputError(f"{path} holds no records of domino bench; expected a file it wrote.")
    return summarise(runs), summarise_loads(loads)


def page(runs: Sequence[RunSummary], loads: Sequence[LoadSummary] = ()) -> str:
    """All runs, one after the other, then all loads."""
    targets = ", ".join(dict.fromkeys(run.facts["target"]["name"] for run in runs))
    served = ", ".join(dict.fromkeys(s["model"] for load in loads for s in load.facts["sides"]))
    titles = [f"Head-to-head on {targets}"] if runs else []
    titles += [f"{'load' if runs else 'Load'} on {served}"] if loads else []
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        _HERE.with_name("page.html").read_text(encoding="utf-8"),
        globals={
            **vars(tables), "charts": charts, "findings": findings, "caveats": caveats,
            "load_charts": load_charts, "load_findings": load_findings,
            "load_caveats": load_tables.caveats, "load_tables": load_tables.tables,
            "how_loaded": load_tables.how_measured,
        },
    )  # fmt: skip
    style = _HERE.with_name("page.css").read_text(encoding="utf-8")
    title = ", ".join(titles)
    return template.render(runs=runs, loads=loads, title=title, style=style) + "\n"


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
    pieces, verdicts = [], []
    for each in overall:
        speedup = each.line(line.method).speed_up
        verdicts.append(verdict_of(speedup))
        pieces.append(f"{verdicts[-1]} at batch size {each.cell.batch_size}: {times(speedup)}")
    rest = (
        f"({cell.task}, T {cell.temperature:g}; acceptance length "
        f"{line.tokens_per_cycle.value:.2f} at batch size {cell.batch_size})"
    )
    if "no interval" in verdicts:
        rest += f". An interval takes {FEWEST} units of each task"
    return Finding.of(line.method, verdicts, "; ".join(pieces), rest)


def caveats(run: RunSummary) -> list[str]:
    """What limits the figures."""
    found = []
    lines = [line for cell in run.cells for line in cell.lines]
    ours = [each["name"] for each in run.facts["methods"] if each["kind"] != LLAMA_CPP]
    for method in ours[1:]:
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
