"""The drafter: configuration, backbone, head, and the rollout that turns them into tokens."""

from domino_spec.drafter.config import DrafterConfig, default_target_layer_ids
from domino_spec.drafter.context import DraftContext
from domino_spec.drafter.heads import DominoHeadConfig, Head, HeadConfig, MarkovHeadConfig
from domino_spec.drafter.model import Drafter, TargetVocabulary
from domino_spec.drafter.rollout import greedy, rollout

__all__ = [
    "DominoHeadConfig",
    "DraftContext",
    "Drafter",
    "DrafterConfig",
    "Head",
    "HeadConfig",
    "MarkovHeadConfig",
    "TargetVocabulary",
    "default_target_layer_ids",
    "greedy",
    "rollout",
]
