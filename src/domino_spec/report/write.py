"""Writes the page and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from domino_spec.bench import read_runs
from domino_spec.errors import InputError
from domino_spec.report.figures import figures
from domino_spec.report.page import page
from domino_spec.report.png import draw_picture


def write_report(
    records: Sequence[str | Path], out: Path, *, pictures: Path | None = None
) -> list[Path]:
    """Everything that was written, the page first."""
    runs = read_runs(records)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(runs), encoding="utf-8")
        written = [out]
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            for run in runs:
                before = f"{run.key[:8]}-" if len(runs) > 1 else ""
                for figure in figures(run):
                    path = pictures / f"{before}{figure.slug}.png"
                    draw_picture(figure, run.methods, path)
                    written.append(path)
    except OSError as error:
        raise InputError(f"{error.filename or out} cannot be written: {error.strerror}.") from error
    return written
