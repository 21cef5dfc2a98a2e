"""The public layout as its first releases have it; the drafter's own reader loads it."""

from __future__ import annotations

from pathlib import Path

from domino_spec.checkpoints.exports.form import Form, Source, everything
from domino_spec.checkpoints.write import save_drafter


def write(source: Source, folder: Path) -> Path:
    """Write the public layout."""
    return save_drafter(source.drafter, folder, dtype=source.dtype, provenance=source.provenance)


HF = Form(
    description="the public layout of DFlash and Domino checkpoints",
    check=everything,
    write=write,
)
