"""Settings that come from outside: pydantic models whose fields say how they are shown.

A field made by `setting` is an option of every command that takes its model (`cli/groups.py`). The
command line imports the models for its help: they must import neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from domino_spec.errors import InputError


def setting(
    default: Any,
    description: str,
    *,
    group: str | None = None,
    unset: str | None = None,
    flags: tuple[str, ...] = (),
    argument: bool = False,
) -> Any:
    """A field: `unset` says what None stands for, `flags` are further names on the command line."""
    shown: dict[str, Any] = {
        "group": group, "unset": unset, "flags": list(flags), "argument": argument,
    }  # fmt: skip
    return Field(default, description=description, json_schema_extra=shown)


ShiftLabel = Annotated[bool | None, setting(
    None, "the alignment of a checkpoint that does not state it", group="Drafter")]  # fmt: skip
Depth = Annotated[int | None, setting(
    None, "drafts a cycle", unset="block size - 1, or what the engine finds to pay",
    group="Drafter")]  # fmt: skip
Candidates = Annotated[int | None, setting(
    None, "let the head choose among this many base candidates", unset="all",
    group="Drafter")]  # fmt: skip


class Settings(BaseModel):
    """A model that refuses what makes no sense with an `InputError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_explained(error)) from None


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
