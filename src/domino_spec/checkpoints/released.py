"""Trained drafters that ship with this package, by name: `released:NAME`."""

from __future__ import annotations

from pathlib import Path

from domino_spec.errors import CheckpointError

PREFIX = "released:"
_ROOT = Path(__file__).parent.parent / "released"
_CONFIG_FILE = "config.json"


def released_names() -> list[str]:
    """What ships, in alphabetical order."""
    return sorted(path.parent.name for path in _ROOT.glob(f"*/{_CONFIG_FILE}"))


def released_folder(source: str) -> Path:
    """The folder of `released:NAME`."""
    name = source.removeprefix(PREFIX)
    names = released_names()
    if name not in names:
        there = ", ".join(f"{PREFIX}{known}" for known in names) or "none yet"
        raise CheckpointError(
            f"no released drafter is called {name!r}; with this package came: {there}. Give one of "
            "them, or give a folder, a file or a hub id."
        )
    return _ROOT / name
