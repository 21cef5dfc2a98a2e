"""Commands: each takes a voice and pydantic models, the command line the models' fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from domino_spec.cli.voice import speaking
from domino_spec.settings import default_text, presentation

JSON = "One JSON document on stdout and nothing else there."
Command = Callable[..., None]


def command(
    *,
    json: str | None = JSON,
    quiet: str | None = None,
    json_lines: bool = False,
    failure: int = 1,
) -> Callable[[Command], Command]:
    """A command whose first parameter is its voice; a text for --json or --quiet adds that option.

    Each field of a model among the parameters is an option of its own. A parameter
    `Annotated[dict[str, Any], Model]` gets the settings that were given, unchecked. Errors exit
    with `failure`.
    """
    switches = {
        "as_json": json and typer.Option("--json", help=json),
        "quiet": quiet and typer.Option("--quiet", "-q", help=quiet),
    }

    def wrap(body: Command) -> Command:
        hints = get_type_hints(body, include_extras=True)
        groups: dict[str, list[inspect.Parameter]] = {}
        parameters: list[inspect.Parameter] = []
        for name, parameter in list(inspect.signature(body).parameters.items())[1:]:
            (among,) = getattr(hints[name], "__metadata__", (None,))[:1]
            if _is_model(hints[name]) or _is_model(among):
                model = among or hints[name]
                groups[name] = list(_model_options(model, partial=among is not None))
                parameters += groups[name]
            else:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(annotation=hints[name], kind=kind))
        parameters += [
            _parameter(name, False, Annotated[bool, option])
            for name, option in switches.items()
            if option
        ]

        @functools.wraps(body)
        def flat(**values: Any) -> None:
            said = {name: values.pop(name, False) for name in switches}
            with speaking(**said, json_lines=json_lines, failure=failure) as voice:
                for name, options in groups.items():
                    fields = {option.name: values.pop(option.name) for option in options}
                    given = {field: v for field, v in fields.items() if v not in (None, [])}
                    values[name] = hints[name](**given)
                body(voice, **values)

        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return flat

    return wrap


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _model_options(model: type[BaseModel], *, partial: bool) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(model)  # without constraints, which pydantic checks
    for name, field in model.model_fields.items():
        if presentation(field):
            yield _setting_option(name, hints[name], field, partial=partial)


def _setting_option(name: str, hint: Any, field: FieldInfo, *, partial: bool) -> inspect.Parameter:
    """A field made by `setting`; `partial`: it may come from elsewhere, so unset is None."""
    shown, words = presentation(field), str(field.description).removesuffix(".")
    default = None if partial or field.is_required() else field.default
    unset = None if field.is_required() else default_text(field)
    more: dict[str, Any] = {
        "help": f"{words[0].upper()}{words[1:]}.".replace("`", ""),
        "show_default": (unset or "").replace("`", "") or False
        if default is None
        else default is not False,
    }
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is dict:
        hint, more["metavar"] = str, "JSON"
    elif get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
        default = None if default is None else list(default)
    if shown["argument"] is not None:
        option = typer.Argument(metavar=shown["argument"] or name.upper(), **more)
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
