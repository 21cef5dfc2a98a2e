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


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "training_length": ((int,), "a whole number"),
    "format_version": ((int,), "a whole number"),
    "tokens_per_cycle": ((int, float), "a number"),
}
_SAMPLED_ENTRIES = 256
_PROBES = (
    "Hello, world! It's 12:34 on 2026-01-31; pi is 3.14159 and 1000000 is a million.",
    "def f(x):\n\treturn {'a': [1, 2]}  # four spaces:    \n\n\n    end\r\n",
    "Ünïcödé: naïve café, straße, e\u0301 against \u00e9, \ufb01, Ａ, ½, ①.",
    "日本語のテキスト、中文文本，한국어, русский текст, العربية, हिन्दी, ไทย.",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀\u200b\u00a0 \t end  ",
)


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
    tokens_per_cycle: float | None = None
    """Greedy acceptance length on conversations held out of training, as last measured."""
    license: str | None = None
    format_version: int | None = None
    created_with: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind, words = _KINDS.get(field.name, ((str,), "a string"))
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ConfigError(
                    f"{CONFIG_KEY}.{field.name} is {value!r}; expected {words}, or leave it out."
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
    """A hash of which text becomes which ids.

    Of what the tokenizer does, not of how it is stored: libraries write the same rules in other
    words from one version to the next.
    """
    vocabulary = tokenizer.get_vocab()
    behaviour: dict[str, Any] = {"vocabulary": sorted(vocabulary.items())}
    if hasattr(tokenizer, "encode"):
        entries = sorted(vocabulary)
        some = entries[:: max(1, len(entries) // _SAMPLED_ENTRIES)]
        probes = [*_PROBES, "".join(some), *some]
        behaviour["ids"] = [tokenizer.encode(text, add_special_tokens=False) for text in probes]
        behaviour["whole"] = tokenizer.encode(_PROBES[0])
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
