"""Training: one process, the target in it, nothing cached on disk."""

from domino_spec.training.config import TrainConfig
from domino_spec.training.prepare import Run, prepare, train
from domino_spec.training.trainer import Observer, Outcome, Trainer
from domino_spec.training.world import World, open_world

__all__ = [
    "Observer",
    "Outcome",
    "Run",
    "TrainConfig",
    "Trainer",
    "World",
    "open_world",
    "prepare",
    "train",
]
