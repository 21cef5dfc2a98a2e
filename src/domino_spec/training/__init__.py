"""Training: one process, the target in it, nothing cached on disk."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domino_spec.training.config import TrainConfig as TrainConfig
    from domino_spec.training.run import Run as Run
    from domino_spec.training.run import prepare as prepare
    from domino_spec.training.run import train as train
    from domino_spec.training.trainer import Observer as Observer
    from domino_spec.training.trainer import Outcome as Outcome
    from domino_spec.training.trainer import Trainer as Trainer
    from domino_spec.training.world import World as World
    from domino_spec.training.world import open_world as open_world

_HOMES = {
    "Observer": "trainer",
    "Outcome": "trainer",
    "Run": "run",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "World": "world",
    "open_world": "world",
    "prepare": "run",
    "train": "run",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the command line's help needs the settings only."""
    if name not in _HOMES:
        raise AttributeError(f"module 'domino_spec.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"domino_spec.training.{_HOMES[name]}"), name)
