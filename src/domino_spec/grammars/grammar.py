"""What a sequence's text must match, checked as far as that needs no compiler."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from domino_spec.errors import InputError

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]
MAX_LENGTH = 128 * 1024
"""Characters of a grammar: a schema of a thousand properties has fewer."""
MAX_NESTING = 64
"""Objects and lists inside one another in a JSON schema."""
MAX_CHOICES = 1000


@dataclass(frozen=True)
class Grammar:
    """A JSON schema, regular expression, list of choices, or grammar in Lark or GBNF."""

    kind: GrammarKind
    text: str
    lenient: bool = False
    """Whether keywords of a JSON schema that cannot be enforced are ignored, not refused."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_LENGTH:
            raise InputError(
                f"the {self.name} has {len(self.text)} characters; at most {MAX_LENGTH} are "
                "compiled. Shorten it."
            )
        if not self.text:
            raise InputError(f"the {self.name} is empty; leave it out, or give one.")

    @property
    def name(self) -> str:
        """What it is, for messages."""
        names = {"json_schema": "JSON schema", "regex": "regular expression"}
        return names.get(self.kind, self.kind)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, lenient: bool = False
    ) -> Grammar:
        """JSON that a schema describes; the schema may be given as text."""
        if isinstance(schema, str):
            if len(schema) > MAX_LENGTH:
                return cls("json_schema", schema)  # which refuses it
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"the JSON schema is not JSON that can be read: {error}."
                ) from error
        if not isinstance(schema, (Mapping, bool)):
            found = type(schema).__name__
            raise InputError(f"the JSON schema is {found}; expected an object, true or false.")
        if nested_deeper(schema, MAX_NESTING):
            raise InputError(
                f"the JSON schema is nested more than {MAX_NESTING} deep. Name its parts in "
                "$defs and refer to them."
            )
        # Sorting the keys would change the order in which an object's properties are written.
        return cls("json_schema", json.dumps(schema, ensure_ascii=False), lenient)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole (Rust's syntax, no look-around)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Grammar:
        """One of these texts."""
        each = list(choices)
        if not 0 < len(each) <= MAX_CHOICES:
            raise InputError(f"there are {len(each)} choices; expected 1 to {MAX_CHOICES}.")
        for one in each:
            if not isinstance(one, str) or not one:
                raise InputError(f"a choice is {one!r}; expected a text of a character or more.")
        return cls("choice", json.dumps(each, ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Grammar:
        """Text of a context-free grammar, in Lark's notation (llguidance's) or GBNF."""
        return cls("grammar", text)


def nested_deeper(value: object, most: int) -> bool:
    """Whether objects and lists are nested more than so deep."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            if isinstance(each, (Mapping, list, tuple))
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return False
    return True
