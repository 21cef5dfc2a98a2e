"""Option groups: a command takes a dataclass or a pydantic model, the command line its fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from domino_spec.cli.voice import speaking
from domino_spec.errors import InputError
from domino_spec.settings import default_text, presentation


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each field of a command's dataclass and model parameters into an option of its own.

    A parameter `Annotated[dict[str, Any], Model]` gets the settings that were given, unchecked.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, list[inspect.Parameter]] = {}
    for name, hint in hints.items():
        (among,) = getattr(hint, "__metadata__", (None,))[:1]
        if _is_model(hint) or _is_model(among):
            groups[name] = list(_model_options(among or hint, partial=among is not None))
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            groups[name] = list(_dataclass_options(hint))
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters.extend(groups[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        built = {}
        try:
            for name, options in groups.items():
                fields = {option.name: values.pop(option.name) for option in options}
                given = {field: v for field, v in fields.items() if v not in (None, [])}
                built[name] = hints[name](**given)
        except InputError:
            with speaking(as_json=values.get("as_json", False)):
                raise
        command(**built, **values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _model_options(model: type[BaseModel], *, partial: bool) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(model)  # without constraints, which pydantic checks
    for name, field in model.model_fields.items():
        if presentation(field):
            yield _setting_option(name, hints[name], field, partial=partial)


def _dataclass_options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        shared = [each for each in hint.__metadata__ if isinstance(each, FieldInfo)]
        if shared:
            yield _setting_option(field.name, hint.__origin__, shared[0], partial=False)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        yield _parameter(field.name, default, hint)


def _setting_option(name: str, hint: Any, field: FieldInfo, *, partial: bool) -> inspect.Parameter:
    """A field made by `setting`; `partial`: it may come from elsewhere, so unset is None."""
    shown, words = presentation(field), str(field.description).removesuffix(".")
    default = None if partial or field.is_required() else field.default
    unset = None if field.is_required() else default_text(field)
    more: dict[str, Any] = {
        "help": f"{words[0].upper()}{words[1:]}.".replace("`", ""),
        "show_default": (unset or "").replace("`", "") or False if default is None else True,
    }
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is dict:
        hint, more["metavar"] = str, "JSON"
    elif get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        default = None if default is None else list(default)
    if shown["argument"]:
        option = typer.Argument(metavar=name.upper(), **more)
    else:
        flag = name.replace("_", "-")
        names = f"--{flag}/--no-{flag}" if hint is bool else f"--{flag}"
        option = typer.Option(names, *shown["flags"], rich_help_panel=shown["group"], **more)
    if field.is_required() and not partial:
        default = inspect.Parameter.empty
    return _parameter(name, default, Annotated[hint | None, option])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
