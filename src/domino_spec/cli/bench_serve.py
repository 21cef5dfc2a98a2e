"""`domino bench serve`: load on a server from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from typer.core import TyperCommand

from domino_spec.cli.options import JsonOption
from domino_spec.cli.voice import speaking
from domino_spec.load.settings import LoadSettings

if TYPE_CHECKING:
    from domino_spec.load.settings import Cell, Side

_SEVERAL = ("--concurrency", "-c", "--rate")


class SeveralValues(TyperCommand):
    """`--concurrency 1 8 32` means `--concurrency 1 --concurrency 8 --concurrency 32`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option in front of each further number."""
        spread: list[str] = []
        option = None
        for word in args:
            if option is not None and spread[-1] != option:
                if not word.replace(".", "", 1).isdigit():
                    option = None
                else:
                    spread.append(option)
            if word.startswith("-"):
                option = word if word in _SEVERAL else None
            spread.append(word)
        parsed: list[str] = super().parse_args(ctx, spread)
        return parsed


def serve(settings: LoadSettings, *, as_json: JsonOption = False) -> None:
    """Load on any OpenAI-compatible server: throughput, latencies, errors; Ctrl-C ends it early.

    With --against, two servers or two kinds of requests to one take turns: ratios come with 95%
    intervals.
    """
    with speaking(as_json=as_json) as voice:
        from domino_spec.load.runner import run_load
        from domino_spec.load.tables import TEXT_HEADS, caveats, how_measured, tables

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"))
        # Drawn four times a second: the client has responses to read in the meantime.
        bars = Progress(*columns, console=voice.err, disable=not voice.shows_bars, transient=True,
                        refresh_per_second=4)  # fmt: skip
        known: dict[tuple[Cell, str], Any] = {}

        def progress(cell: Cell, side: Side, done: int, total: int | None) -> None:
            key = (cell, side.name)
            if key not in known:
                known[key] = bars.add_task(f"{cell}, {side.name}", total=total)
            bars.update(known[key], completed=done)

        with bars:
            summary, path, complete = run_load(settings, notice=voice.status, progress=progress)
        notes = caveats(summary)
        if as_json:
            ended = {"records": str(path), "interrupted": not complete}
            voice.document({**summary.to_dict(), **ended, "notes": notes,
                            "warnings": voice.warnings})  # fmt: skip
        else:
            for found in tables(summary):
                table = Table(title=found.title, box=None, title_justify="left")
                for head in found.heads:
                    text = head in TEXT_HEADS
                    table.add_column(head, justify="left" if text else "right", overflow="fold")
                for line in found.lines:
                    table.add_row(*line)
                voice.out.print(table)
            voice.out.print(how_measured(summary))
            for note in (*notes, f"raw records: {path}"):
                voice.note(note)
        if not complete:
            voice.status("interrupted; these are the figures so far")
            raise typer.Exit(130)
        if not summary.completed:
            voice.error("no request was completed; the records hold the errors.")
            raise typer.Exit(1)
