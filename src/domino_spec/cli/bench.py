"""`domino bench`: drafters against plain decoding on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from domino_spec.bench.settings import BenchSettings, EngineSettings
from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import ChatOptions, require_places, target_arguments, with_own_blocks
from domino_spec.cli.render import table
from domino_spec.load.settings import LoadSettings
from domino_spec.settings import TargetOptions

if TYPE_CHECKING:
    from domino_spec.bench.summary import Line, RunSummary
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


@bench_app.command("run")
@command()
def run(
    voice: Voice, settings: BenchSettings, *, chat: ChatOptions, target_options: TargetOptions
) -> None:
    """Drafters against plain decoding: tasks, temperatures, batch sizes; killed runs go on.

    All methods run on the same path over the same weights, in turns; speedups come with 95%
    intervals. Loops and short answers are left out and counted.
    """
    revision, prompts = target_options.revision, settings.prompts
    require_places(voice, settings.target, revision, drafts=settings.draft, prompts=prompts)

    from domino_spec.bench.runner import run_bench
    from domino_spec.bench.tables import (
        HEADS,
        LEFT_OUT_HEADS,
        OVER_HEADS,
        how_measured,
        left_out_rows,
        method_rows,
        over_rows,
    )

    target_options = with_own_blocks(voice, settings.target, target_options)
    with voice.progress() as update:
        summary, path = run_bench(
            settings,
            say=voice.status,
            progress=lambda cell, done, total: update(str(cell), done, total),
            system=chat.system,
            chat_options=chat.template_options(),
            load=target_arguments(target_options),
        )
    if voice.as_json:
        voice.document({**document(summary), "records": str(path), "warnings": voice.warnings})
    else:
        title, words = "Speedup over plain decoding", ("task", "method")
        figures = table(HEADS, method_rows(summary), words=words, title=title)
        figures.caption, figures.caption_justify = how_measured(summary), "left"
        voice.out.print(figures)
        if over := over_rows(summary):
            title = "Speedup over other implementations"
            words_too = (*words, "over")
            voice.out.print(table(OVER_HEADS, over, words=words_too, title=title))
        left_out = left_out_rows(summary)
        voice.out.print(table(LEFT_OUT_HEADS, left_out, words=("task",), title="Prompts"))
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
        "(--limit), smaller batches (--batch-size), a smaller --shortest-answer, more "
        "--max-new-tokens or, where answers loop, a temperature (-t 0.7)."
    )


def document(summary: RunSummary) -> dict[str, Any]:
    """The figures for machines."""

    def figures(line: Line) -> dict[str, Any]:
        intervals = ("speed_up", "decoding_speed_up", "tokens_per_cycle")
        plain = ("tokens_per_second", "same", "compared", "peak_memory")
        return {
            **{name: vars(getattr(line, name)) for name in intervals},
            **{name: getattr(line, name) for name in plain},
            "over": {
                other: {"speed_up": vars(whole), "decoding_speed_up": vars(decoding)}
                for other, (whole, decoding) in line.over.items()
            },
            "acceptance_by_position": line.counts.acceptance_by_position,
            "cycle_ms": None if line.cycle is None else vars(line.cycle),
        }

    counts = ("units", "used", "loops", "short", "too_long", "left_over")
    cells = [
        {
            **vars(found.cell),
            **{name: getattr(found, name) for name in counts},
            "methods": {line.method: figures(line) for line in found.lines},
        }
        for found in (*summary.cells, *summary.overall)
    ]
    return {"facts": dict(summary.facts), "cells": cells}


@bench_app.command("engine")
@command()
def engine(
    voice: Voice,
    settings: EngineSettings,
    *,
    out: Annotated[Path | None, typer.Option(help="Append the record to this file.")] = None,
) -> None:
    """The engine against the memory's floor: random weights of any shape, acceptance forced."""
    from domino_spec.bench.engine_report import measure_engine
    from domino_spec.records import append_record, environment

    record = measure_engine(settings, voice.status) | {"environment": environment()}
    if out is not None:
        append_record(out, record)
    if voice.as_json:
        voice.document(record)
        return
    for each in engine_tables(record):
        voice.out.print(each)


def engine_tables(record: dict[str, Any]) -> list[Table]:
    """The record for people."""
    whole = [("plain step", record["plain"]), (f"cycle of {record['depth']}", record["cycle"])]
    rows = [
        (name, _ms(held["seconds"]), _ms(held["floor"]), f"{held['over_floor']:.2f}")
        for name, held in [*whole, *((f"  {s['name']}", s) for s in record["stages"])]
    ]
    if (tree := record.get("tree")) is not None:
        rows.append((f"cycle of a tree of {tree['nodes']}", _ms(tree["seconds"]), "", ""))
        rows.append(("  tree", _ms(tree["stages"]["tree"]), "", ""))
    for name, seconds in record.get("reference", {}).items():
        rows.append((f"Transformers loop, {name}", _ms(seconds), "", ""))
    stored = f", {record['quantize']} weights" if record.get("quantize") else ""
    title = f"{record['shape']}, {record['dtype']}{stored}, {record['context']} tokens, 1 row"
    parts = table(("part", "ms", "floor, ms", "× floor"), rows, words=("part",), title=title)
    parts.caption = f"floor: bytes over {record['bandwidth'] / 1e12:.2f} TB/s, measured here"
    gains = [
        (
            entry["rows"],
            f"{entry['plain_per_second']:,.0f}",
            *(f"{gain['gain']:.2f}× ({gain['depth']} drafts)" for gain in entry["gains"]),
        )
        for entry in record["batches"]
    ]
    heads = ("rows", "plain, tokens/s", *(f"{tokens:g} a cycle" for tokens in record["forced"]))
    title = "Over plain decoding on the same engine (acceptance forced)"
    return [parts, table(heads, gains, title=title)]


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


@bench_app.command("serve", cls=SeveralValues)
@command()
def serve(voice: Voice, settings: LoadSettings) -> None:
    """Load on any OpenAI-compatible server: throughput, latencies, errors; Ctrl-C ends it early.

    With --against, two servers or two kinds of requests to one take turns: ratios come with 95%
    intervals.
    """
    from domino_spec.load.runner import run_load
    from domino_spec.load.tables import TEXT_HEADS, caveats, how_measured, tables

    with voice.progress() as update:

        def progress(cell: Load, side: Side, done: int, total: int | None) -> None:
            update(f"{cell}, {side.name}", done, total)

        summary, path, complete = run_load(settings, notice=voice.status, progress=progress)
    notes = caveats(summary)
    if voice.as_json:
        ended = {"records": str(path), "interrupted": not complete}
        voice.document({**summary.to_dict(), **ended, "notes": notes,
                        "warnings": voice.warnings})  # fmt: skip
    else:
        for found in tables(summary):
            voice.out.print(table(found.heads, found.lines, words=TEXT_HEADS, title=found.title))
        voice.out.print(how_measured(summary))
        for note in (*notes, f"raw records: {path} · a page of them: domino report {path}"):
            voice.note(note)
    if not complete:
        voice.status("interrupted; these are the figures so far")
        raise typer.Exit(130)
    if not summary.completed:
        voice.error("no request was completed; the records hold the errors.")
        raise typer.Exit(1)


@command()
def report(
    voice: Voice,
    records: Annotated[list[Path], typer.Argument(help="Files that domino bench wrote.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(help="Also each chart as a PNG into this folder.")
    ] = None,
) -> None:
    """One HTML page of head-to-heads and load tests; it needs no network and no server."""
    from domino_spec.report import write_report

    written = [str(path) for path in write_report(records, out, pictures=png)]
    if voice.as_json:
        voice.document({"written": written, "warnings": voice.warnings})
    else:
        voice.out.print("\n".join(written), soft_wrap=True)
