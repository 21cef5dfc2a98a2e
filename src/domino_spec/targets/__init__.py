"""Targets: loading them, tapping them, rolling their cache back."""

from domino_spec.targets.cache import TargetCache
from domino_spec.targets.load import (
    LoadedTarget,
    default_device,
    load_config,
    load_target,
    load_tokenizer,
    resolved_revision,
)
from domino_spec.targets.probe import probe_target
from domino_spec.targets.reading import Reading, read
from domino_spec.targets.target import Target, TargetOutput

__all__ = [
    "LoadedTarget",
    "Reading",
    "Target",
    "TargetCache",
    "TargetOutput",
    "default_device",
    "load_config",
    "load_target",
    "load_tokenizer",
    "probe_target",
    "read",
    "resolved_revision",
]
