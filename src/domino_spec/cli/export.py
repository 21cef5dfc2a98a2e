"""`domino export`: a drafter's checkpoint in another form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domino_spec.cli.loading import require_drafter
from domino_spec.cli.options import Dtype, JsonOption
from domino_spec.cli.voice import Voice, speaking
from domino_spec.errors import InputError

if TYPE_CHECKING:
    from domino_spec.checkpoints import Checkpoint

_TO_HF = "hf"
_PACKED = "packed"
_HELP = (
    "The form to write: hf (the public layout), sglang (what SGLang serves), speculators (that "
    "project's layout), vllm (what vLLM serves with our plugin) or vllm-dspark (the same for its "
    "dspark method)."
)


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
    to: Annotated[str, typer.Option(help=_HELP)] = _TO_HF,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="The drafter's target; speculators and vllm store its lm_head rows with a "
            "reduced vocabulary.",
        ),
    ] = None,
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
    """Write a drafter for other engines, in the form they read, or packed."""
    with speaking(as_json=as_json) as voice:
        require_drafter(voice, source, revision=revision)
        _check(to, dtype, pack, out, force)
        from domino_spec.checkpoints import describe, load_drafter

        voice.status(f"reading {source}")
        checkpoint = load_drafter(
            source,
            revision=revision,
            shift_label=shift_label,
            num_target_layers=num_target_layers,
        )
        if pack is not None:
            folder = _write_packed(checkpoint, out, pack, target)
        else:
            folder = _write(voice, checkpoint, out, to, dtype, target)
        written = describe(folder)
        form = to if pack is None else _PACKED
        if as_json:
            voice.document(
                {
                    "source": checkpoint.source,
                    "folder": str(folder),
                    "form": form,
                    "layout": written.layout,
                    "dtypes": list(written.dtypes),
                    "bytes": written.byte_count,
                }
            )
            return
        made_for = f" for {form}" if form not in (_TO_HF, _PACKED, written.layout) else ""
        voice.out.print(
            f"wrote {folder}: {written.layout} layout{made_for}, {written.tensor_count} tensors, "
            f"{written.byte_count / 1e6:,.1f} MB, {', '.join(written.dtypes)}",
            soft_wrap=True,
        )


def _check(to: str, dtype: Dtype | None, pack: Pack | None, out: Path, force: bool) -> None:
    from domino_spec.checkpoints import find_format

    find_format(to)
    if pack is not None and to != _TO_HF:
        raise InputError(
            f"--pack {pack.value} and --to {to} were both given, but no other engine reads packed "
            "weights; drop one of them."
        )
    if pack is not None and dtype is not None:
        raise InputError(
            f"--pack {pack.value} and --dtype {dtype.value} were both given, but packed weights "
            "have no other type; drop one of them."
        )
    if (out.expanduser() / "config.json").exists() and not force:
        raise InputError(
            f"{out} already holds a checkpoint; name another folder, or replace it with --force."
        )


def _write_packed(checkpoint: Checkpoint, out: Path, pack: Pack, target: str | None) -> Path:
    from domino_spec.checkpoints import save_packed

    _refuse_idle_target(target, f"--pack {pack.value}")
    return save_packed(
        checkpoint.drafter, out, bits=int(pack.value), provenance=checkpoint.provenance
    )


def _write(
    voice: Voice,
    checkpoint: Checkpoint,
    out: Path,
    to: str,
    dtype: Dtype | None,
    target: str | None,
) -> Path:
    import torch

    from domino_spec.api.lm_head import lm_head_rows
    from domino_spec.checkpoints import export_drafter, find_format

    drafter, form = checkpoint.drafter, find_format(to)
    chosen = torch.bfloat16 if dtype is None else dtype.resolved()
    stored = drafter.dtype if isinstance(chosen, str) else chosen
    form.check(drafter.config, stored)
    rows = None
    if not form.wants_lm_head(drafter.config):
        _refuse_idle_target(target, f"--to {to} of this drafter")
    elif target is not None:
        voice.status(f"loading target {target} for its lm_head")
        rows = lm_head_rows(checkpoint, target)
    return export_drafter(
        drafter, out, to=to, dtype=stored, provenance=checkpoint.provenance, lm_head=rows
    )


def _refuse_idle_target(target: str | None, form: str) -> None:
    if target is not None:
        raise InputError(
            f"--target {target} was given, but {form} stores nothing of a target; drop it."
        )
