"""`domino bench serve`: load on a server from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from domino_spec.cli.load_options import AgainstOptions, AskedOptions, GoalOptions, LoadOptions
from domino_spec.cli.options import JsonOption
from domino_spec.cli.voice import Voice, speaking

if TYPE_CHECKING:
    from domino_spec.load import Cell, RunSummary, Side, Watcher


def serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")
    ],
    *,
    load: LoadOptions,
    asked: AskedOptions,
    compared: AgainstOptions,
    goals: GoalOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file of raw records, added to; unset: load-MODEL-RUN.jsonl in this folder."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load on any OpenAI-compatible server: throughput, latencies, errors; Ctrl-C ends it early.

    With --against two servers, or two ways to ask one, take turns: ratios come with 95% intervals.
    """
    with speaking(as_json=as_json) as voice:
        from domino_spec.load import run_load
        from domino_spec.load.options import request_of
        from domino_spec.load.tables import doubts

        options = {**vars(load), **vars(asked), **vars(compared), **vars(goals)}
        request = request_of(url=url, out=out, **options)
        with _watching(voice) as watcher:
            summary, path, whole = run_load(request, watcher)
        if as_json:
            notes = {"notes": doubts(summary), "warnings": voice.warnings}
            ended = {"records": str(path), "interrupted": not whole}
            voice.document({**summary.to_dict(), **ended, **notes})
        else:
            for table in tables(summary):
                voice.out.print(table)
            for doubt in doubts(summary):
                voice.note(doubt)
            voice.note(f"raw records: {path}")
        if not whole:
            voice.status("interrupted; these are the figures so far")
            raise typer.Exit(130)
        if not summary.completed:
            voice.error("no request was answered; the records say why.")
            raise typer.Exit(1)


@contextmanager
def _watching(voice: Voice) -> Iterator[Watcher]:
    """A bar a load and side on a terminal."""
    from domino_spec.load import Watcher

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
    # Drawn four times a second: the client has answers to take in the meantime.
    bars = Progress(*columns, console=voice.err, disable=not voice.shows_bars, transient=True,
                    refresh_per_second=4)  # fmt: skip
    known: dict[tuple[Cell, str], Any] = {}

    class Bars(Watcher):
        def say(self, message: str) -> None:
            voice.status(message)

        def progress(self, cell: Cell, side: Side, done: int, total: int | None) -> None:
            key = (cell, side.name)
            if key not in known:
                known[key] = bars.add_task(f"{cell}, {side.name}", total=total)
            bars.update(known[key], completed=done)

    with bars:
        yield Bars()


def tables(summary: RunSummary) -> list[Table]:
    """The figures for people."""
    from domino_spec.load.tables import (
        RATIO_HEADS,
        TIME_HEADS,
        how_measured,
        pace_heads,
        pace_rows,
        ratio_rows,
        ratio_title,
        time_rows,
    )

    found = [
        _table("Throughput", pace_heads(summary), pace_rows(summary)),
        _table("Times", TIME_HEADS, time_rows(summary)),
    ]
    if any(cell.comparison for cell in summary.cells):
        found.append(_table(ratio_title(summary), RATIO_HEADS, ratio_rows(summary)))
    found[-1].caption, found[-1].caption_justify = how_measured(summary), "left"
    return found


def _table(title: str, heads: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title, box=None, title_justify="left")
    for head in heads:
        words = head in ("load", "side", "ms", "errors")
        table.add_column(head, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
