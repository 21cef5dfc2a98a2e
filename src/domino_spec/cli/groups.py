"""Option groups: a command takes a dataclass or a pydantic model, the command line its fields."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

from pydantic import BaseModel, ValidationError
from typer.models import ParameterInfo

from domino_spec.cli.voice import speaking
from domino_spec.errors import InputError


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each field of a command's dataclass and model parameters into an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, list[inspect.Parameter]] = {}
    for name, hint in hints.items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            groups[name] = list(_model_options(hint))
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
        taken = {
            name: {option.name: values.pop(option.name) for option in options}
            for name, options in groups.items()
        }
        try:
            built = {name: hints[name](**fields) for name, fields in taken.items()}
        except ValidationError as error:
            with speaking(as_json=values.get("as_json", False)):
                raise InputError(explained(error)) from error
        command(**built, **values)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def explained(error: ValidationError) -> str:
    """What pydantic refused, as one sentence for each field."""
    found = []
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Exception):  # a validator of ours, which says everything
            found.append(str(cause).removesuffix("."))
        else:
            name = next(str(part) for part in detail["loc"])
            found.append(f"{name} is {detail['input']!r}; {_lowered(detail['msg'])}")
    return "; ".join(found) + "."


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _model_options(model: type[BaseModel]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(model)  # without constraints, which pydantic checks
    for name, field in model.model_fields.items():
        (info,) = (each for each in field.metadata if isinstance(each, ParameterInfo))
        default = field.get_default(call_default_factory=True)
        yield _option(
            name,
            inspect.Parameter.empty if field.is_required() else default,
            Annotated[hints[name], info],
        )


def _dataclass_options(group: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        yield _option(field.name, default, hints[field.name])


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
