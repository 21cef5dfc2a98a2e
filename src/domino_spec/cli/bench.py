"""`domino bench`: drafters against plain decoding on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from domino_spec.bench.settings import BenchSettings, EngineSettings
from domino_spec.cli.groups import grouped
from domino_spec.cli.loading import checkpoints_among, require_places
from domino_spec.cli.options import (
    ChatOptions,
    JsonOption,
    TargetOptions,
)
from domino_spec.cli.voice import Voice, speaking
from domino_spec.load.settings import LoadSettings

if TYPE_CHECKING:
    from domino_spec.bench.runner import Watcher
    from domino_spec.bench.settings import Cell
    from domino_spec.bench.summary import RunSummary
    from domino_spec.load.settings import Cell as Load
    from domino_spec.load.settings import Side


class DefaultGroup(TyperGroup):
    """`domino bench TARGET` means `domino bench run TARGET`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before what names none."""
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["run", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


bench_app = typer.Typer(
    cls=DefaultGroup,
    no_args_is_help=True,
    help="Measure speed on this machine: domino bench TARGET --draft A --draft B.",
)


def run(
    settings: BenchSettings,
    *,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
) -> None:
    """Drafters against plain decoding: tasks, temperatures, batch sizes; killed runs go on.

    All methods run on the same path over the same weights, in turns; speedups come with 95%
    intervals. Loops and short answers are left out and counted.
    """
    with speaking(as_json=as_json) as voice:
        require_places(
            voice,
            settings.target,
            revision=target_options.revision,
            drafts=checkpoints_among(settings.draft),
            prompts=settings.prompts,
        )

        from domino_spec.bench.runner import run_bench

        with _watching(voice) as watcher:
            summary, path = run_bench(
                settings,
                watcher,
                system=chat.system,
                chat_options=chat.template_options(),
                load=target_options.arguments(),
            )
        if as_json:
            voice.document({**document(summary), "records": str(path), "warnings": voice.warnings})
        else:
            for table in tables(summary):
                voice.out.print(table)
            voice.note(f"raw records: {path} · a page of them: domino report {path}")
        if not any(cell.used for cell in summary.cells):
            voice.error(_nothing_measured(summary))
            raise typer.Exit(1)


def _nothing_measured(summary: RunSummary) -> str:
    names = ("loops", "short", "too_long", "left_over")
    counts = {name: sum(getattr(cell, name) for cell in summary.cells) for name in names}
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    return (
        f"nothing was measured: no prompt counts ({told or 'there are none'}); expected a full "
        "batch of answers that end and are long enough. Give other --prompts, more of them "
        "(--limit), smaller batches (--batch-size), a smaller --shortest-answer or more "
        "--max-new-tokens."
    )


@contextmanager
def _watching(voice: Voice) -> Iterator[Watcher]:
    """A bar a cell on a terminal; a line a cell elsewhere."""
    from domino_spec.bench.runner import Watcher

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of "
               "{task.total}"), TimeRemainingColumn())  # fmt: skip
    bars = Progress(*columns, console=voice.err, disable=not voice.shows_bars, transient=True)
    known: dict[Cell, Any] = {}

    class Bars(Watcher):
        def say(self, message: str) -> None:
            voice.status(message)

        def progress(self, cell: Cell, done: int, total: int) -> None:
            if cell not in known:
                known[cell] = bars.add_task(str(cell), total=total)
            bars.update(known[cell], completed=done)

    with bars:
        yield Bars()


def document(summary: RunSummary) -> dict[str, Any]:
    """The figures for machines."""
    cells = [
        {
            **found.cell.to_dict(),
            **{
                name: getattr(found, name)
                for name in ("units", "used", "loops", "short", "too_long", "left_over")
            },
            "methods": {
                line.method: {
                    "speed_up": line.speed_up.to_dict(),
                    "decoding_speed_up": line.decoding_speed_up.to_dict(),
                    "tokens_per_cycle": line.tokens_per_cycle.to_dict(),
                    "tokens_per_second": line.tokens_per_second,
                    "acceptance_by_position": line.counts.acceptance_by_position,
                    "cycle_ms": None if line.cycle is None else vars(line.cycle),
                    "same": line.same,
                    "compared": line.compared,
                    "peak_memory": line.peak_memory,
                }
                for line in found.lines
            },
        }
        for found in (*summary.cells, *summary.overall)
    ]
    return {"facts": dict(summary.facts), "cells": cells}


def tables(summary: RunSummary) -> list[Table]:
    """The figures for people."""
    from domino_spec.bench.tables import (
        HEADS,
        LEFT_OUT_HEADS,
        how_measured,
        left_out_rows,
        method_rows,
    )

    figures = Table(title="Speedup over plain decoding", box=None, title_justify="left")
    _fill(figures, HEADS, method_rows(summary), words=("task", "method"))
    figures.caption, figures.caption_justify = how_measured(summary), "left"
    left_out = Table(title="Prompts", box=None, title_justify="left")
    _fill(left_out, LEFT_OUT_HEADS, left_out_rows(summary), words=("task",))
    return [figures, left_out]


def _fill(
    table: Table, heads: tuple[str, ...], rows: list[list[str]], *, words: tuple[str, ...]
) -> None:
    for head in heads:
        table.add_column(head, justify="left" if head in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row, style="dim" if "plain" in row else None)


def engine(
    settings: EngineSettings,
    *,
    out: Annotated[Path | None, typer.Option(help="Append the record to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The engine against the memory's floor: random weights of any shape, acceptance forced."""
    with speaking(as_json=as_json) as voice:
        from domino_spec.bench.engine_report import measure_engine
        from domino_spec.records import append_record, environment

        record = measure_engine(settings, voice.status) | {"environment": environment()}
        if out is not None:
            append_record(out, record)
        if as_json:
            voice.document(record)
            return
        for table in engine_tables(record):
            voice.out.print(table)


def engine_tables(record: dict[str, Any]) -> list[Table]:
    """The record for people."""
    parts = Table(title=f"{record['shape']}, {record['dtype']}, {record['context']} tokens, 1 row")
    for name in ("part", "ms", "floor, ms", "× floor"):
        parts.add_column(name, justify="left" if name == "part" else "right")
    whole = [("plain step", record["plain"]), (f"cycle of {record['depth']}", record["cycle"])]
    for name, held in [*whole, *((f"  {s['name']}", s) for s in record["stages"])]:
        parts.add_row(name, _ms(held["seconds"]), _ms(held["floor"]), f"{held['over_floor']:.2f}")
    for name, seconds in record.get("reference", {}).items():
        parts.add_row(f"Transformers loop, {name}", _ms(seconds), "", "")
    parts.caption = f"floor: bytes over {record['bandwidth'] / 1e12:.2f} TB/s, measured here"
    gains = Table(title="Over plain decoding on the same engine (acceptance forced)")
    gains.add_column("rows", justify="right")
    gains.add_column("plain, tokens/s", justify="right")
    for tokens in record["forced"]:
        gains.add_column(f"{tokens:g} a cycle", justify="right")
    for entry in record["batches"]:
        cells = [f"{gain['gain']:.2f}× ({gain['depth']} drafts)" for gain in entry["gains"]]
        gains.add_row(str(entry["rows"]), f"{entry['plain_per_second']:,.0f}", *cells)
    return [parts, gains]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


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
        known: dict[tuple[Load, str], Any] = {}

        def progress(cell: Load, side: Side, done: int, total: int | None) -> None:
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


def report(
    records: Annotated[list[Path], typer.Argument(help="Files that domino bench wrote.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(help="Also each chart as a PNG into this folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """One HTML page of the figures, charts and circumstances; it needs no network and no server."""
    with speaking(as_json=as_json) as voice:
        from domino_spec.report import write_report

        written = [str(path) for path in write_report(records, out, pictures=png)]
        if as_json:
            voice.document({"written": written, "warnings": voice.warnings})
        else:
            voice.out.print("\n".join(written), soft_wrap=True)


bench_app.command("run")(grouped(run))
bench_app.command("engine")(grouped(engine))
bench_app.command("serve", cls=SeveralValues)(grouped(serve))
