"""Prompts to be answered, from any file of questions or conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.data.chat import Message, messages_of
from domino_spec.data.files import (
    PROMPT_FILES,
    TEXT_FILES,
    BadRow,
    BadRows,
    Place,
    find_places,
    read_rows,
    read_text,
    source_of,
)
from domino_spec.errors import DataError


@dataclass(frozen=True)
class PromptRow:
    """What a user says, turn by turn; the target answers each."""

    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""

    def opening(self) -> list[Message]:
        """The messages before the first turn."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their files."""

    rows: list[PromptRow]
    bad: BadRows = field(default_factory=BadRows)

    def fingerprint(self) -> str:
        """A hash of all prompts in their order."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.system, *row.turns]).encode())
        return digest.hexdigest()


def read_prompts(
    sources: Sequence[str | Path], *, limit: int | None = None, system: str | None = None
) -> PromptSet:
    """Read prompts: a line of a text, or a row with turns, messages, conversations or a prompt.

    Answers that stand in the rows are left out: the target writes its own. `system` is said
    where a row has no system message.
    """
    if not sources:
        raise DataError("no prompts were named; give files, folders or hf:name.")
    bad = BadRows()
    rows: list[PromptRow] = []
    for place in [place for source in sources for place in find_places(source, kinds=PROMPT_FILES)]:
        for row in _rows_of(place, bad):
            if limit is not None and len(rows) >= limit:
                break
            rows.append(row if row.system is not None else PromptRow(row.turns, system, row.source))
    if not rows:
        reasons = "; ".join(bad.lines()) or "the files hold no rows"
        raise DataError(f"no prompts in {', '.join(map(str, sources))}: {reasons}.")
    return PromptSet(rows, bad)


def _rows_of(place: Place, bad: BadRows) -> list[PromptRow]:
    if place.suffix in TEXT_FILES:
        lines = read_text(place.path).splitlines()
        return [PromptRow((line.strip(),), source=place.name) for line in lines if line.strip()]
    found = []
    for where, row in read_rows(place, bad):
        try:
            found.append(_prompt(row, source_of(row, place)))
        except BadRow as reason:
            bad.add(str(reason), where)
    return found


def _prompt(row: Mapping[str, Any], source: str) -> PromptRow:
    turns = row.get("turns")
    if turns is not None:
        if not isinstance(turns, (list, tuple)) or not all(isinstance(t, str) for t in turns):
            raise BadRow("its turns are not a list of texts")
        return PromptRow(_said(turns), source=source)
    messages = messages_of(row)
    if messages is not None:
        if any(message["role"] == "tool" for message in messages):
            raise BadRow("it uses tools, which only their owner can answer for")
        said = [m["content"] for m in messages if m["role"] == "user"]
        system = next(
            (m["content"] for m in messages if m["role"] in ("system", "developer")), None
        )
        return PromptRow(_said(said), system, source)
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str):
        names = ", ".join(sorted(map(str, row))[:6])
        raise BadRow(f"it has no turns, messages, conversations or prompt (found {names})")
    return PromptRow(_said([text]), source=source)


def _said(turns: Sequence[str]) -> tuple[str, ...]:
    if not turns:
        raise BadRow("it has no user turn")
    if not all(turn.strip() for turn in turns):
        raise BadRow("it has an empty user turn")
    return tuple(turns)
