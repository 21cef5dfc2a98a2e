"""A plan of training runs: the settings of each, how many steps it may take, who won.

`base` settings are shared. A run has its own `settings` and a budget: `steps`, `steps_of` another
run, or `seconds`, from which the steps follow once a short trial has measured the seconds a step
(`rate_of` takes another run's: the work of a step is the same). `best_of` holds groups of runs:
the settings of each group's winner on held-out conversations are taken over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of a plan."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    steps: int | None = None
    steps_of: str | None = None
    rate_of: str | None = None
    best_of: tuple[tuple[str, ...], ...] = ()
    keep: bool = False

    @property
    def label(self) -> str:
        """Its name, unless it repeats another run with that run's steps."""
        return f"{self.name}, steps of {self.steps_of}" if self.steps_of else self.name

    @property
    def budget(self) -> dict[str, Any]:
        """What it was given, for the record."""
        given = {"seconds": self.seconds, "steps": self.steps, "steps_of": self.steps_of}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Runs alike but for their own settings."""

    name: str
    base: dict[str, Any]
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """From a YAML file."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        entries = tuple(
            Entry(**{**run, "best_of": tuple(tuple(group) for group in run.get("best_of", ()))})
            for run in content["runs"]
        )
        labels = [entry.label for entry in entries]
        if len(set(labels)) != len(labels):
            raise SystemExit(f"{path} names a run twice: {labels}.")
        return cls(name=path.name, base=content.get("base", {}), entries=entries)

    def find(self, name: str) -> Entry:
        """The run of that label."""
        found = [entry for entry in self.entries if entry.label == name]
        if not found:
            raise SystemExit(f"{self.name} has no run {name!r}.")
        return found[0]

    def timed(self) -> list[Entry]:
        """The runs whose seconds a step a trial must tell."""
        return [e for e in self.entries if e.seconds is not None and e.rate_of is None]

    def steps(self, entry: Entry, rates: Mapping[str, float]) -> int:
        """How many steps a run may take."""
        if entry.steps is not None:
            return entry.steps
        if entry.steps_of is not None:
            return self.steps(self.find(entry.steps_of), rates)
        if entry.seconds is None:
            raise SystemExit(f"{entry.name} has no budget: give seconds, steps or steps_of.")
        return max(10, round(entry.seconds / rates[entry.rate_of or entry.label]))


def own_settings(entry: Entry, earlier: Mapping[str, Record], set_name: str) -> dict[str, Any]:
    """The settings of the winners a run follows, which records name, then its own."""
    own: dict[str, Any] = {}
    for group in entry.best_of:
        missing = [name for name in group if name not in earlier]
        if missing:
            raise SystemExit(f"{entry.name} follows {missing}, which were not measured.")
        best = max(group, key=lambda name: earlier[name]["tokens_per_cycle"][set_name]["on"])
        own |= earlier[best]["settings"]
    return own | entry.settings
