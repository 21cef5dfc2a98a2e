"""Training: one process, the target in it, nothing cached on disk."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

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
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "config": "TrainConfig",
            "run": "Run prepare train",
            "trainer": "Observer Outcome Trainer",
            "world": "World open_world",
        },
    )
