"""`domino export`: a drafter's checkpoint in another form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import require_drafter, resolved_dtype
from domino_spec.errors import InputError
from domino_spec.settings import Settings, ShiftLabel, setting

if TYPE_CHECKING:
    from domino_spec.checkpoints import Checkpoint

_PACKED = "packed"


class ExportSettings(Settings):
    """Which drafter is written, where and in which form."""

    source: str = setting(
        ..., "the drafter: a folder, a safetensors file, a hub id or released:NAME", argument=""
    )
    out: Path = setting(..., "the folder to write", argument="")
    to: str = setting(
        "hf",
        "the form to write: hf (the public layout), sglang (what SGLang serves), speculators (that "
        "project's layout), vllm (what vLLM serves with our plugin) or vllm-dspark (the same for "
        "its dspark method)",
    )
    target: str | None = setting(
        None,
        "the drafter's target; speculators and vllm store its lm_head rows with a reduced "
        "vocabulary",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = setting(
        None, "type of the weights; auto keeps the stored one", unset="bfloat16"
    )
    pack: Literal["8", "6", "4"] | None = setting(
        None, "write our own packed form, with this many bits a weight, instead"
    )
    revision: str | None = setting(None, "the drafter's hub revision")
    shift_label: ShiftLabel = None
    num_target_layers: int | None = setting(
        None, "layers of the target, where a checkpoint does not say"
    )
    force: bool = setting(False, "replace a checkpoint that is already in OUT")


@command()
def export(voice: Voice, settings: ExportSettings) -> None:
    """Write a drafter for other engines, in the form they read, or packed."""
    require_drafter(voice, settings.source, revision=settings.revision)
    _check(settings)
    from domino_spec.checkpoints import describe, load_drafter

    voice.status(f"reading {settings.source}")
    checkpoint = load_drafter(
        settings.source,
        revision=settings.revision,
        shift_label=settings.shift_label,
        num_target_layers=settings.num_target_layers,
    )
    folder = _write(voice, checkpoint, settings)
    written = describe(folder)
    form = settings.to if settings.pack is None else _PACKED
    if voice.as_json:
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
    made_for = f" for {form}" if form not in ("hf", _PACKED, written.layout) else ""
    voice.say(
        f"wrote {folder}: {written.layout} layout{made_for}, {written.tensor_count} tensors, "
        f"{written.byte_count / 1e6:,.1f} MB, {', '.join(written.dtypes)}"
    )


def _check(settings: ExportSettings) -> None:
    from domino_spec.checkpoints import find_format

    find_format(settings.to)
    packed = f"--pack {settings.pack} and"
    if settings.pack is not None and settings.to != "hf":
        raise InputError(
            f"{packed} --to {settings.to} were both given, but no other engine reads packed "
            "weights; drop one of them."
        )
    if settings.pack is not None and settings.dtype is not None:
        raise InputError(
            f"{packed} --dtype {settings.dtype} were both given, but packed weights have no other "
            "type; drop one of them."
        )
    if (settings.out.expanduser() / "config.json").exists() and not settings.force:
        raise InputError(
            f"{settings.out} already holds a checkpoint; name another folder, or replace it with "
            "--force."
        )


def _write(voice: Voice, checkpoint: Checkpoint, settings: ExportSettings) -> Path:
    import torch

    from domino_spec.api.lm_head import lm_head_rows
    from domino_spec.checkpoints import export_drafter, find_format, save_packed

    drafter, out, to = checkpoint.drafter, settings.out, settings.to
    form = find_format(to)
    chosen = resolved_dtype(settings.dtype or "bfloat16")
    dtype = chosen if isinstance(chosen, torch.dtype) else drafter.dtype
    if settings.pack is None:
        form.check(drafter.config, dtype)
    if settings.target is not None and (settings.pack or not form.wants_lm_head(drafter.config)):
        what = f"--pack {settings.pack}" if settings.pack else f"--to {to} of this drafter"
        raise InputError(
            f"--target {settings.target} was given, but {what} stores nothing of a target; drop it."
        )
    if settings.pack is not None:
        return save_packed(drafter, out, bits=int(settings.pack), provenance=checkpoint.provenance)
    rows = None
    if settings.target is not None:
        voice.status(f"loading target {settings.target} for its lm_head")
        rows = lm_head_rows(checkpoint, settings.target)
    return export_drafter(
        drafter, out, to=to, dtype=dtype, provenance=checkpoint.provenance, lm_head=rows
    )
