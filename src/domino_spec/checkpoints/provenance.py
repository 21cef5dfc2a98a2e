"""What a drafter was made for and how: stored in config.json, unknown unless stated."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from domino_spec.errors import ConfigError

FORMAT_VERSION = 1
CONFIG_KEY = "domino_spec"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Facts that the tensors cannot tell. None means unknown, never "does not matter"."""

    target_id: str | None = None
    target_revision: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    thinking: str | None = None
    """Whether the training responses were made with thinking "on" or "off"."""
    training_length: int | None = None
    """Tokens of the longest training sequence."""
    license: str | None = None
    format_version: int | None = None
    created_with: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind = int if field.name in ("training_length", "format_version") else str
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ConfigError(
                    f"{CONFIG_KEY}.{field.name} is {value!r}; expected "
                    f"{'a whole number' if kind is int else 'a string'}, or leave it out."
                )
        if self.thinking not in (None, "on", "off"):
            raise ConfigError(
                f"{CONFIG_KEY}.thinking is {self.thinking!r}; expected 'on', 'off' or nothing."
            )

    def to_dict(self) -> dict[str, Any]:
        """The known facts only."""
        return {name: v for name, v in dataclasses.asdict(self).items() if v is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Build from plain values; unknown names and newer formats are errors."""
        version = values.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ConfigError(
                f"{CONFIG_KEY}.format_version is {version}, this release reads up to "
                f"{FORMAT_VERSION}; upgrade domino-spec to load this checkpoint."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigError(
                f"{CONFIG_KEY} has no field {', '.join(map(repr, unknown))}; known fields are "
                f"{', '.join(names)}. Remove it from config.json."
            )
        return cls(**values)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what text becomes which ids; truncation and padding settings do not count."""
    behaviour: dict[str, Any] = {"vocabulary": sorted(tokenizer.get_vocab().items())}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        rules = json.loads(backend.to_str())
        behaviour["rules"] = {
            name: rule for name, rule in rules.items() if name not in ("truncation", "padding")
        }
    return _sha256(_canonical(behaviour))


def chat_template_fingerprint(tokenizer: Any) -> str | None:
    """A hash of the chat template (of all of them where there are several), None without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return _sha256(template if isinstance(template, str) else _canonical(template))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
