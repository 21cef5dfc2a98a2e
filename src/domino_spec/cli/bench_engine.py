"""`domino bench engine`: where the time of a cycle goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from domino_spec.cli.options import Dtype, JsonOption
from domino_spec.cli.voice import speaking

_WHAT = "Measurement"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What to measure."""

    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.", rich_help_panel=_WHAT)] = (
        Dtype.BFLOAT16
    )
    context: Annotated[
        int, typer.Option(min=1, help="Tokens already in the cache.", rich_help_panel=_WHAT)
    ] = 1024
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1, help="Drafts are chosen among so many base candidates; unset: all tokens.",
            rich_help_panel=_WHAT,
        ),
    ] = None  # fmt: skip
    rows: Annotated[
        list[int],
        typer.Option("--rows", min=1, help="Rows at a time; repeatable.", rich_help_panel=_WHAT),
    ] = field(default_factory=lambda: [1])
    tokens_per_cycle: Annotated[
        list[float],
        typer.Option(
            min=1.0, help="Acceptance to force, labelled so; repeatable.", rich_help_panel=_WHAT
        ),
    ] = field(default_factory=lambda: [7.17, 4.2])
    reference: Annotated[
        bool, typer.Option(help="Also the Transformers loop.", rich_help_panel=_WHAT)
    ] = True


def engine(
    shape: Annotated[
        str, typer.Argument(help="qwen3-0.6b, qwen3-4b, qwen3-8b, llama-3-8b, or a config.json.")
    ],
    options: EngineOptions,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; unset: a GPU if any.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the record to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The engine against the memory's floor: random weights of any shape, acceptance forced."""
    with speaking(as_json=as_json) as voice:
        import torch

        from domino_spec.engine.report import Request, measure_engine
        from domino_spec.records import append_record, environment
        from domino_spec.targets import default_device

        dtype = options.dtype.resolved()
        request = Request(
            shape=shape,
            dtype=dtype if isinstance(dtype, torch.dtype) else torch.bfloat16,
            device=default_device() if device is None else torch.device(device),
            context=options.context,
            candidates=options.candidates,
            batches=tuple(options.rows),
            tokens_per_cycle=tuple(options.tokens_per_cycle),
            reference=options.reference,
        )
        record = measure_engine(request, voice.status) | {"environment": environment()}
        if out is not None:
            append_record(out, record)
        if as_json:
            voice.document(record)
            return
        for table in tables(record):
            voice.out.print(table)


def tables(record: dict[str, Any]) -> list[Table]:
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
