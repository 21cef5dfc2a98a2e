"""`domino report`: a page of a head-to-head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from domino_spec.cli.options import JsonOption
from domino_spec.cli.voice import speaking


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
