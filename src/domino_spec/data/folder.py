"""A folder that work is written to part by part: stop it anywhere, go on later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_spec.errors import DataError

if TYPE_CHECKING:
    from domino_spec.checkpoints import TargetFacts

_SETTINGS = "_settings.json"


class WorkFolder:
    """Parts are written whole or not at all, each with a note of what went into it.

    A part's note is there before the part is, so that what is there can always be told. The
    settings lie next to them: another run must have the same ones.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, suffix: str) -> None:
        self.path = Path(path)
        self._suffix = suffix
        if self.path.exists() and not self.path.is_dir():
            raise DataError(f"{path} is a file; expected a folder to write to.")
        self.path.mkdir(parents=True, exist_ok=True)
        found = self.path / _SETTINGS
        if found.exists():
            self._check_same(read_json(found), settings)
            return
        others = [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]
        if others:
            raise DataError(
                f"the folder {path} already holds {sorted(others)[0]}; expected an empty folder or "
                "one this command has begun."
            )
        write_whole(found, json.dumps(settings, indent=2, sort_keys=True) + "\n")

    def part(self, number: int) -> Path:
        """Where a part goes."""
        return self.path / f"part-{number:05d}{self._suffix}"

    def is_done(self, number: int) -> bool:
        """Whether a part is there, as a whole."""
        return self.part(number).exists() and self._note(number).exists()

    def note(self, number: int) -> dict[str, Any]:
        """What was noted about a part."""
        return read_json(self._note(number))

    def write_note(self, number: int, note: Mapping[str, Any]) -> None:
        """Note what goes into a part, before it is written."""
        write_whole(self._note(number), json.dumps(note, sort_keys=True) + "\n")

    def write_lines(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a part of JSON lines."""
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(self.part(number), "".join(lines))

    def _note(self, number: int) -> Path:
        return self.path / f"_part-{number:05d}.json"

    def _check_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(now))
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if changed:
            name = changed[0]
            raise DataError(
                f"the folder {self.path} was begun with {name} {_short(before.get(name))}, now it "
                f"is {_short(now.get(name))}; give the same settings to go on, or another folder."
            )


def target_identity(target: str, facts: TargetFacts) -> dict[str, Any]:
    """What a folder keeps to: the target by its weights, or by its name where a server has it."""
    return {
        "target": target,
        "tokenizer_sha256": facts.tokenizer_sha256,
        "chat_template_sha256": facts.chat_template_sha256,
        "thinking": facts.thinking,
    }


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file of ours."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); begin in another folder.") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} holds no settings; begin in another folder.")
    return values


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
