"""The page: one HTML file that fetches and runs nothing; all text of records is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from domino_spec.bench.statistics import FEWEST
from domino_spec.bench.summary import ALL, CellSummary, Line, RunSummary, read_runs
from domino_spec.bench.tables import (
    HEADS,
    LEFT_OUT_HEADS,
    TAKING_PART_HEADS,
    how_measured,
    left_out_rows,
    method_rows,
    taking_part_rows,
    times,
)
from domino_spec.drafters import PLAIN
from domino_spec.errors import InputError
from domino_spec.report.charts import Chart, Table, charts

_STYLE = Path(__file__).with_name("page.css")
# Whatever a name in the records holds: nothing may be loaded or run.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
    title = escape(f"Head-to-head on {names}")
    sections = "".join(
        _section(run, index, several=len(runs) > 1) for index, run in enumerate(runs)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{title}</title>'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main><h1>{title}</h1>"
        '<p class="soft">Drafters against plain decoding: measured by <code>domino bench</code>, '
        "every figure made from its raw records.</p>"
        f"{sections}</main></body></html>\n"
    )


def _section(run: RunSummary, index: int, *, several: bool) -> str:
    target, settings = run.facts["target"], run.settings
    heading = f"{target['name']} · {settings['engine']} · {run.environments[0]['hardware']}"
    parts = [f"<section><h2>{escape(heading)}</h2>" if several else "<section>"]
    found = [
        f'<li class="{f.kind}"><b>{escape(f.method)}</b>: <strong>{escape(f.verdict)}</strong> '
        f"{escape(f.rest)}.</li>"
        for f in findings(run)
    ]
    if found:
        parts.append(f'<ul class="lead">{"".join(found)}</ul>')
    limits = "".join(f"<li>{escape(caveat)}</li>" for caveat in caveats(run))
    if limits:
        parts.append(f"<h2>Caveats</h2><ul>{limits}</ul>")
    drawn = [_figure(chart, f"r{index}-{number}") for number, chart in enumerate(charts(run))]
    if drawn:
        parts.append(f'<h2>Charts</h2><div class="charts">{"".join(drawn)}</div>')
    parts += [
        "<h2>All figures</h2>",
        _table((HEADS, method_rows(run)), "95% intervals in brackets.",
               dimmed=[line[HEADS.index("method")] == PLAIN for line in method_rows(run)]),
        '<h2>Excluded prompts</h2><p class="soft">Plain decoding answered every prompt once '
        "before anything was timed. A text that loops flatters any drafter, an answer shorter than "
        f"{escape(str(settings['shortest_answer']))} tokens says little, a batch that is not full "
        "is another batch size.</p>",
        _table((LEFT_OUT_HEADS, left_out_rows(run)), "Prompts"),
        "<h2>How it was measured</h2>",
        f"<p>{escape(how_measured(run))}</p>",
        _table((TAKING_PART_HEADS, taking_part_rows(run)), "Methods"),
        "".join(_environment(e) for e in run.environments),
        f'<p class="soft">Run <code>{escape(run.key[:12])}</code>, target '
        f"<code>{escape(target['fingerprint'][:12])}</code>.</p></section>",
    ]  # fmt: skip
    return "\n".join(parts)


def _figure(chart: Chart, name: str) -> str:
    return (
        f'<figure aria-labelledby="{name}-h"><h3 id="{name}-h">{escape(chart.title)} '
        f"<small>{escape(chart.where)}</small></h3>"
        f"<figcaption>{escape(chart.caption)}</figcaption>{chart.svg(name)}"
        f"<details><summary>As a table</summary>{_table(chart.table, chart.title)}</details>"
        "</figure>"
    )


def _table(table: Table, caption: str, *, dimmed: Sequence[bool] = ()) -> str:
    heads, lines = table
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = ""
    for index, line in enumerate(lines):
        kind = ' class="plain"' if dimmed and dimmed[index] else ""
        body += f"<tr{kind}>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>"
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _environment(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    facts = {
        "hardware": environment["hardware"],
        "date": environment["date"],
        "commit": environment["commit"],
        "versions": f"Python {environment['python']}, {versions}",
    }
    items = "".join(f"<dt>{k}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    command = f"<dt>command</dt><dd><code>{escape(environment['command'])}</code></dd>"
    return f"<dl>{items}{command}</dl>"


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
