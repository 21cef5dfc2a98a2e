"""Checks that the configurations share: known names, required names, positive numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from domino_spec.errors import ConfigError


def known_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as arguments of a dataclass; unknown or missing names are errors."""
    fields = dataclasses.fields(cls)
    names = {f.name for f in fields}
    unknown = sorted(set(values) - names)
    if unknown:
        raise ConfigError(
            f"{cls.__name__} has no field {', '.join(map(repr, unknown))}; "
            f"known fields are {', '.join(sorted(names))}."
        )
    required = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(values))
    if missing:
        raise ConfigError(f"{cls.__name__} lacks the field {', '.join(map(repr, missing))}.")
    return dict(values)


def require_positive(config: Any, *names: str) -> None:
    """Raise unless each of these fields is a positive whole number."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; expected a positive whole number.")
