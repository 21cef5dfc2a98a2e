"""The file of a run: everything measured so far, so that a killed run goes on where it was.

Lines of JSON, each with the run's key and circumstances: one `run` (what was measured with what),
a `cell` for each cell (which prompts count), a `unit` for each batch of prompts (every method,
every repeat: comparisons are paired inside it) and, from the engine, `stages`. A file belongs to
one run; what could change a figure is part of the run's key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_spec.bench.settings import Cell, digest
from domino_spec.errors import InputError
from domino_spec.records import append_record, environment

RUN, CELL, UNIT, STAGES = "run", "cell", "unit", "stages"
_MACHINE = ("hardware", "python", "versions", "commit")
_SHORT_KEY = 8


class Journal:
    """What of a run is on file, and the way to add to it."""

    def __init__(self, path: Path, facts: Mapping[str, Any], *, stem: str | None = None) -> None:
        """With `stem`, a file of the run's own in the folder `path`, which it finds again."""
        self.environment = environment()
        # What of the circumstances a time depends on: another day does not change it.
        self.facts = {**facts, "machine": {name: self.environment[name] for name in _MACHINE}}
        self.key = digest(self.facts)
        self.path = path if stem is None else path / f"bench-{stem}-{self.key[:_SHORT_KEY]}.jsonl"
        self.records: list[dict[str, Any]] = []

    def open(self) -> None:
        """Read what is there; refuse a file of another run."""
        if self.path.exists():
            self.records = _read_whole_lines(self.path)
        if not self.records:
            self.add(RUN, facts=self.facts)
            return
        first = self.records[0]
        if first.get("record") != RUN:
            raise InputError(
                f"{self.path} is not a file of domino bench; expected a first line of the kind "
                f"{RUN!r}. Give another --out."
            )
        if first["key"] != self.key:
            changed = ", ".join(_changes(first["facts"], self.facts)) or "how it is written down"
            raise InputError(
                f"{self.path} holds another run: what differs is {changed}. Figures of two runs "
                "do not mix; give another --out, or leave it out."
            )

    def cell(self, cell: Cell, prompts: str) -> dict[str, Any] | None:
        """What is on file of which prompts count, if anything; `prompts` is their hash."""
        for record in self.of(CELL):
            if record["cell"]["task"] == cell.task and record["prompts_digest"] != prompts:
                raise InputError(
                    f"{self.path} has other prompts of the name {cell.task}; rename the new ones, "
                    "or give another --out."
                )
        return next((r for r in self.of(CELL) if r["cell"] == vars(cell)), None)

    def units(self, cell: Cell) -> set[int]:
        """Which units of a cell are done."""
        return {r["unit"] for r in self.of(UNIT) if r["cell"] == vars(cell)}

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All records of a kind."""
        return [record for record in self.records if record["record"] == kind]

    def add(self, kind: str, **values: Any) -> dict[str, Any]:
        """Write one record down."""
        record = {"record": kind, "key": self.key, **values, "environment": self.environment}
        append_record(self.path, record)
        self.records.append(record)
        return record


def _read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that was never finished is taken off the file."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    try:
        records = [json.loads(line) for line in data[:whole].splitlines()]
    except ValueError as error:
        raise InputError(f"{path} is not a file of JSON lines: {error}.") from error
    if not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path} is not a file of records; give another --out.")
    return records


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    """Where two trees of plain values differ, by name."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted({*old, *new}):
            found += _changes(old.get(key), new.get(key), f"{name} {key}".strip())
        return found
    return [name] if digest(old) != digest(new) else []
