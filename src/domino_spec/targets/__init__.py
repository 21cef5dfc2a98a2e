"""Targets: loading them, capturing hidden states, rolling their cache back."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.targets.cache import TargetCache as TargetCache
    from domino_spec.targets.load import LoadedTarget as LoadedTarget
    from domino_spec.targets.load import default_device as default_device
    from domino_spec.targets.load import load_config as load_config
    from domino_spec.targets.load import load_target as load_target
    from domino_spec.targets.load import load_tokenizer as load_tokenizer
    from domino_spec.targets.load import resolved_revision as resolved_revision
    from domino_spec.targets.probe import probe_target as probe_target
    from domino_spec.targets.target import Reading as Reading
    from domino_spec.targets.target import Target as Target
    from domino_spec.targets.target import TargetOutput as TargetOutput
    from domino_spec.targets.target import read as read
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "cache": "TargetCache",
            "load": "LoadedTarget default_device load_config load_target load_tokenizer "
            "resolved_revision",
            "probe": "probe_target",
            "target": "Reading Target TargetOutput read",
        },
    )
