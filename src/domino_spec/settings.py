"""Settings that come from outside: pydantic models whose fields say how they are shown.

A field made by `setting` is an option of every command that takes its model (`cli/command.py`). The
command line imports the models for its help: they must import neither torch nor transformers.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from domino_spec.errors import InputError

AcceptRule = Literal["coupled", "match", "rejection", "block"]
"""How sampled drafts are accepted (`decoding.SamplingParams.accept`)."""


def setting(
    default: Any,
    description: str,
    *,
    group: str | None = None,
    unset: str | None = None,
    flags: tuple[str, ...] = (),
    argument: str | None = None,
) -> Any:
    """A field: `unset` says what None stands for, `flags` are further names on the command line.

    `argument` makes it an argument called so there, or by its own name if empty.
    """
    shown: dict[str, Any] = {
        "group": group, "unset": unset, "flags": list(flags), "argument": argument,
    }  # fmt: skip
    return Field(default, description=description, json_schema_extra=shown)


ShiftLabel = Annotated[bool | None, setting(
    None, "the alignment of a checkpoint that does not state it", group="Drafter")]  # fmt: skip
Depth = Annotated[int | None, setting(
    None, "drafts a cycle", unset="block size - 1, or what the engine finds to pay",
    group="Drafter")]  # fmt: skip
Tree = Annotated[int | None, setting(
    None, "drafts a cycle in a tree instead of a chain; 0: chains alone",
    unset="whatever the engine finds to pay", group="Drafter")]  # fmt: skip
Candidates = Annotated[int | None, setting(
    None, "let the head choose among this many base candidates",
    unset="32 of a Domino head on a GPU and of trees, else all",
    group="Drafter")]  # fmt: skip
DraftWindow = Annotated[int | None, setting(
    None, "a block drafter reads this many of the newest tokens, and --draft-sinks; 0: all",
    unset="its own configuration",
    group="Drafter")]  # fmt: skip
DraftSinks = Annotated[int | None, setting(
    None, "first tokens that a drafter with a window reads too", unset="none",
    group="Drafter")]  # fmt: skip

Thinking = Annotated[bool | None, setting(
    None, "switch a template that knows enable_thinking", unset="its own default",
    group="Chat template")]  # fmt: skip


class Settings(BaseModel):
    """A model that refuses what makes no sense with an `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_explained(error)) from None

    def replace(self, **changes: Any) -> Self:
        """The same with other values, checked as a whole."""
        return type(self)(**{**dict(self), **changes})


_target = partial(setting, group="Target")
_drafter = partial(setting, group="Drafter")
Dtype = Literal["auto", "float32", "bfloat16", "float16", "fastest"]
Quantize = Literal["keep", "int8", "int4", "fp8"]


class TargetOptions(Settings):
    """How the target is loaded."""

    revision: str | None = _target(None, "the target's hub revision")
    dtype: Dtype | None = _target(
        None,
        "type of the weights; fastest measures a CPU once",
        unset="float32 on a CPU, else the checkpoint's own; a GGUF file's: bfloat16",
    )
    device: str | None = _target(None, "where to run: cpu, cuda, cuda:1, ...", unset="a GPU if any")
    device_map: str | None = _target(
        None, "spread over devices: auto, or a JSON object (needs accelerate)"
    )
    attn_implementation: str | None = _target(None, "attention of the target, such as sdpa")
    quantize: Quantize | None = _target(
        None,
        "run weights in few bits: int8 and int4 round those of Llama, Mistral, OLMo 2, Qwen2 and "
        "Qwen3, on CUDA of Granite too, and fp8 there; keep runs a GGUF file's own blocks on a CPU",
        unset="weights are as they are (AWQ, GPTQ and FP8 checkpoints too); keep for a GGUF file "
        "whose blocks a CPU multiplies all, without --dtype and but for `domino data`; else its "
        "weights are unpacked",
    )
    trust_remote_code: bool = _target(False, "run modelling code that the target brings along")


class DraftOptions(Settings):
    """Which drafter, and how much it drafts."""

    draft: str | None = _drafter(
        None,
        "the drafter: a folder, a safetensors file, a hub id, released:NAME or lookup[:DEPTH]; "
        "without one decoding is plain",
    )
    draft_revision: str | None = _drafter(None, "the drafter's hub revision")
    shift_label: ShiftLabel = None
    depth: Depth = None
    tree: Tree = None
    candidates: Candidates = None
    draft_window: DraftWindow = None
    draft_sinks: DraftSinks = None
    remeasure: bool = _drafter(
        False, "measure anew what cycles cost on this machine, by which drafts are chosen"
    )


def presentation(field: FieldInfo) -> dict[str, Any]:
    """How a field is shown: the arguments of `setting`; empty for a field that is no option."""
    shown = field.json_schema_extra
    return shown if isinstance(shown, dict) else {}


def default_text(field: FieldInfo) -> str | None:
    """What an unset setting is, in words."""
    value = field.default
    if field.is_required() or value is None:
        return "needed" if field.is_required() else presentation(field)["unset"]
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _explained(error: ValidationError) -> str:
    """One sentence for each field that was refused."""
    found = []
    for detail in error.errors():
        context = detail.get("ctx", {})
        if isinstance(context.get("error"), Exception):  # of a validator, which says everything
            found.append(str(context["error"]).removesuffix("."))
            continue
        expected = detail["msg"][:1].lower() + detail["msg"][1:]
        if detail["type"] == "greater_than_equal":
            expected = f"expected {context['ge']:g} or more"
        found.append(f"{detail['loc'][0]} is {detail['input']!r}; {expected}")
    return "; ".join(found) + "."


def require_folder(path: str | Path) -> None:
    """Refuse a place to write to where a file is in the way of the folder."""
    path = Path(path)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InputError(
            f"{path} cannot be written to: {there} is a file; expected a folder, or a path where "
            "there is nothing yet. Name another folder with --out, or move the file away."
        )
