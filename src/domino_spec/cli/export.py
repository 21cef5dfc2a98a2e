"""`domino export`: a drafter's checkpoint in another form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domino_spec.cli.options import Dtype, JsonOption
from domino_spec.cli.voice import speaking
from domino_spec.errors import InputError

if TYPE_CHECKING:
    from domino_spec.checkpoints import Checkpoint

_TO_HF = "hf"
_KNOWN = {_TO_HF: "the public layout of DFlash and Domino checkpoints"}


class Pack(StrEnum):
    """Bits of a packed weight."""

    EIGHT = "8"
    SIX = "6"
    FOUR = "4"


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The drafter: a folder, a safetensors file, a hub id or released:NAME.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    *,
    to: Annotated[
        str, typer.Option(help="The form to write; hf is the public layout of DFlash and Domino.")
    ] = _TO_HF,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Type of the weights; auto keeps the stored one; unset: bfloat16."),
    ] = None,
    pack: Annotated[
        Pack | None,
        typer.Option(help="Write our own packed form, with this many bits a weight, instead."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The drafter's hub revision.")] = None,
    shift_label: Annotated[
        bool | None,
        typer.Option(
            "--shift-label/--no-shift-label",
            help="The alignment of a checkpoint that does not state it.",
        ),
    ] = None,
    num_target_layers: Annotated[
        int | None, typer.Option(help="Layers of the target, where a checkpoint does not say.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a checkpoint that is already in OUT.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a drafter in the public layout, for any engine that reads it, or packed."""
    with speaking(as_json=as_json) as voice:
        _check(to, dtype, pack, out, force)
        from domino_spec.checkpoints import describe, load_drafter

        voice.status(f"reading {source}")
        checkpoint = load_drafter(
            source,
            revision=revision,
            shift_label=shift_label,
            num_target_layers=num_target_layers,
        )
        folder = _write(checkpoint, out, dtype, pack)
        written = describe(folder)
        if as_json:
            voice.document(
                {
                    "source": checkpoint.source,
                    "folder": str(folder),
                    "layout": written.layout,
                    "dtypes": list(written.dtypes),
                    "bytes": written.byte_count,
                }
            )
            return
        voice.out.print(
            f"wrote {folder}: {written.layout} layout, {written.tensor_count} tensors, "
            f"{written.byte_count / 1e6:,.1f} MB, {', '.join(written.dtypes)}",
            soft_wrap=True,
        )


def _check(to: str, dtype: Dtype | None, pack: Pack | None, out: Path, force: bool) -> None:
    if to not in _KNOWN:
        known = ", ".join(f"{name} ({meaning})" for name, meaning in _KNOWN.items())
        raise InputError(f"--to is {to!r}; expected one of: {known}.")
    if pack is not None and dtype is not None:
        raise InputError(
            f"--pack {pack.value} and --dtype {dtype.value} were both given, but packed weights "
            "have no other type; drop one of them."
        )
    if (out.expanduser() / "config.json").exists() and not force:
        raise InputError(
            f"{out} already holds a checkpoint; name another folder, or replace it with --force."
        )


def _write(checkpoint: Checkpoint, out: Path, dtype: Dtype | None, pack: Pack | None) -> Path:
    import torch

    from domino_spec.checkpoints import save_drafter, save_packed

    drafter, provenance = checkpoint.drafter, checkpoint.provenance
    if pack is not None:
        return save_packed(drafter, out, bits=int(pack.value), provenance=provenance)
    chosen = torch.bfloat16 if dtype is None else dtype.resolved()
    stored = drafter.dtype if isinstance(chosen, str) else chosen
    return save_drafter(drafter, out, dtype=stored, provenance=provenance)
