"""Typed reading of config.json: a value of the wrong type or stated twice differently is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from domino_spec.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Stated:
    """One field as a config states it; the value is None where the config is silent."""

    label: str
    value: Any


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it sits, so that messages name the whole path of a field."""

    values: Mapping[str, Any]
    place: str = ""

    def __getitem__(self, name: str) -> Stated:
        label = f"{self.place}.{name}" if self.place else name
        return Stated(label, self.values.get(name))

    def nested(self, name: str) -> Fields:
        """The object under `name`; an absent one is empty."""
        stated = self[name]
        value = {} if stated.value is None else stated.value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{stated.label} is {value!r}; expected a JSON object. Correct config.json."
            )
        return Fields(value, stated.label)


def integer(*places: Stated) -> int | None:
    """The whole number that all the places which state it agree on."""
    return cast("int | None", _agreed(places, (int,), "a whole number"))


def number(*places: Stated) -> float | None:
    """The number that all the places which state it agree on."""
    return cast("float | None", _agreed(places, (int, float), "a number"))


def boolean(*places: Stated) -> bool | None:
    """The truth value that all the places which state it agree on."""
    return cast("bool | None", _agreed(places, (bool,), "true or false"))


def text(*places: Stated) -> str | None:
    """The string that all the places which state it agree on."""
    return cast("str | None", _agreed(places, (str,), "a string"))


def items(stated: Stated, read: Callable[..., T | None]) -> tuple[T, ...] | None:
    """A list whose items are read one by one."""
    value = stated.value
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{stated.label} is {value!r}; expected a list. Correct config.json.")
    return tuple(required(Stated(stated.label, item), read) for item in value)


def integers(stated: Stated) -> tuple[int, ...] | None:
    """A list of whole numbers."""
    return items(stated, integer)


def texts(stated: Stated) -> tuple[str, ...] | None:
    """A list of strings."""
    return items(stated, text)


def required(stated: Stated, read: Callable[..., T | None], *others: Stated) -> T:
    """What `read` finds; silence is an error that names the field."""
    value = read(stated, *others)
    if value is None:
        names = " or ".join(place.label for place in (stated, *others))
        raise ConfigError(
            f"config.json lacks {names}; add the value the checkpoint was trained with."
        )
    return value


def default(value: T | None, fallback: T) -> T:
    """The value, or the fallback where the config is silent."""
    return fallback if value is None else value


def _agreed(places: Sequence[Stated], kinds: tuple[type, ...], expected: str) -> Any:
    known = [place for place in places if place.value is not None]
    for place in known:
        # A bool is an int to Python; here the two never stand for each other.
        wrong_bool = isinstance(place.value, bool) and bool not in kinds
        if wrong_bool or not isinstance(place.value, kinds):
            raise ConfigError(
                f"{place.label} is {place.value!r}; expected {expected}. Correct config.json."
            )
    for place in known[1:]:
        if place.value != known[0].value:
            raise ConfigError(
                f"{known[0].label} is {known[0].value!r} but {place.label} is {place.value!r}; "
                "they state the same thing and must agree. Correct the wrong one in config.json."
            )
    return known[0].value if known else None


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Values that fill a gap in a config.

    An alignment that contradicts the config is an error here. A depth that does is left to the
    check against the target, which can say whose drafter it is.
    """

    shift_label: bool | None = None
    num_target_layers: int | None = None

    def alignment(self, stated: bool | None, *, label: str, has_head: bool) -> bool:
        """The alignment; a head whose config is silent about it needs an explicit value."""
        given = self.shift_label
        if stated is not None and given is not None and stated != given:
            raise ConfigError(
                f"{label} is {stated} in config.json but shift_label={given} was asked for; a "
                "drafter works only with the alignment it was trained with. Drop the argument, or "
                "correct config.json if it is wrong."
            )
        if stated is not None:
            return stated
        if given is not None:
            return given
        if has_head:
            raise ConfigError(
                f"config.json has a head but lacks {label}, and the weights cannot tell. "
                "Pass shift_label=True (--shift-label) if slot 0 predicts the token after the "
                "anchor, as in public Qwen3 Domino checkpoints, shift_label=False "
                "(--no-shift-label) if slot 1 does."
            )
        return False

    def target_depth(self, stated: int | None, *, label: str) -> int:
        """The number of target layers, from the config or from the caller."""
        depth = self.num_target_layers if stated is None else stated
        if depth is None:
            raise ConfigError(
                f"config.json lacks {label}; pass num_target_layers with the number of layers of "
                "the target model."
            )
        return depth
