"""The drafter: configuration, backbone, head, and the rollout that turns them into tokens."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.drafter.config import DominoHeadConfig as DominoHeadConfig
    from domino_spec.drafter.config import DrafterConfig as DrafterConfig
    from domino_spec.drafter.config import HeadConfig as HeadConfig
    from domino_spec.drafter.config import MarkovHeadConfig as MarkovHeadConfig
    from domino_spec.drafter.config import default_target_layer_ids as default_target_layer_ids
    from domino_spec.drafter.heads import Head as Head
    from domino_spec.drafter.model import Drafter as Drafter
    from domino_spec.drafter.model import DraftModel as DraftModel
    from domino_spec.drafter.model import TargetVocabulary as TargetVocabulary
    from domino_spec.drafter.rollout import greedy as greedy
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "config": "DrafterConfig default_target_layer_ids DominoHeadConfig HeadConfig "
            "MarkovHeadConfig",
            "heads": "Head",
            "model": "DraftModel Drafter TargetVocabulary",
            "rollout": "greedy",
        },
    )
