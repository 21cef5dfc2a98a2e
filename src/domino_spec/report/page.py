"""The page: one HTML file with everything in it, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from domino_spec.bench import PLAIN, RunSummary
from domino_spec.bench.tables import (
    HEADS,
    LEFT_OUT_HEADS,
    TAKING_PART_HEADS,
    how_measured,
    left_out_rows,
    method_rows,
    taking_part_rows,
)
from domino_spec.report.figures import Figure, Table, figures
from domino_spec.report.svg import draw
from domino_spec.report.words import doubts, findings

_STYLE = Path(__file__).with_name("page.css")
# Whatever a name in the records holds: nothing may be loaded or run.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[RunSummary]) -> str:
    """All runs, one after the other."""
    names = ", ".join(dict.fromkeys(run.facts["target"]["name"] for run in runs))
    title = f"Head-to-head on {names}"
    sections = "".join(
        _section(run, index, several=len(runs) > 1) for index, run in enumerate(runs)
    )
    style = _STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>\n{style}</style></head>\n<body><main><h1>{escape(title)}</h1>"
        '<p class="soft">Drafters against plain decoding: measured by <code>domino bench</code>, '
        "every figure made from its raw records.</p>"
        f"{sections}</main></body></html>\n"
    )


def _section(run: RunSummary, index: int, *, several: bool) -> str:
    target, settings = run.facts["target"], run.settings
    shortest = escape(str(settings["shortest_answer"]))
    heading = f"{target['name']} · {settings['engine']} · {run.environments[0]['hardware']}"
    parts = [f"<section><h2>{escape(heading)}</h2>" if several else "<section>"]
    leads = [
        f'<li class="{f.kind}"><b>{escape(f.subject)}</b>: <strong>{escape(f.found)}</strong> '
        f"{escape(f.rest)}.</li>"
        for f in findings(run)
    ]
    if leads:
        parts.append(f'<ul class="lead">{"".join(leads)}</ul>')
    doubtful = doubts(run)
    if doubtful:
        items = "".join(f"<li>{escape(doubt)}</li>" for doubt in doubtful)
        parts.append(f"<h2>Before you believe it</h2><ul>{items}</ul>")
    drawn = [_figure(f, run, f"r{index}-{number}") for number, f in enumerate(figures(run))]
    if drawn:
        parts.append(f'<h2>Charts</h2><div class="charts">{"".join(drawn)}</div>')
    parts += [
        "<h2>All figures</h2>",
        _table((HEADS, method_rows(run)), "95% intervals in brackets; rows are at a time.",
               methods=True),
        "<h2>What was left out</h2><p class=\"soft\">Plain decoding answered every prompt once "
        "before anything was timed. A loop flatters any drafter, an answer shorter than "
        f"{shortest} tokens says little, a batch that is not full is another "
        "batch size.</p>",
        _table((LEFT_OUT_HEADS, left_out_rows(run)), "Prompts"),
        "<h2>How it was measured</h2>",
        f"<p>{escape(how_measured(run))}</p>",
        _table((TAKING_PART_HEADS, taking_part_rows(run)), "What took part"),
        "".join(_environment(e) for e in run.environments),
        f'<p class="soft">Run <code>{escape(run.key[:12])}</code>, target '
        f"<code>{escape(target['fingerprint'][:12])}</code>.</p></section>",
    ]  # fmt: skip
    return "\n".join(parts)


def _figure(figure: Figure, run: RunSummary, name: str) -> str:
    return (
        f'<figure aria-labelledby="{name}-h"><h3 id="{name}-h">{escape(figure.title)} '
        f"<small>{escape(figure.where)}</small></h3>"
        f"<figcaption>{escape(figure.caption)}</figcaption>{draw(figure, run.methods, name)}"
        f"<details><summary>As a table</summary>{_table(figure.table(), figure.title)}</details>"
        "</figure>"
    )


def _table(table: Table, caption: str, *, methods: bool = False) -> str:
    heads, rows = table
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f"<tr{_plain(row) if methods else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _plain(row: Sequence[str]) -> str:
    return ' class="plain"' if row[HEADS.index("method")] == PLAIN else ""


def _environment(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    facts = {
        "hardware": environment["hardware"],
        "date": environment["date"],
        "commit": environment["commit"],
        "versions": f"Python {environment['python']}, {versions}",
    }
    rows = "".join(f"<dt>{k}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    command = f"<dt>command</dt><dd><code>{escape(environment['command'])}</code></dd>"
    return f"<dl>{rows}{command}</dl>"
