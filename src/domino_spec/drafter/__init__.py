"""Trained drafters: configurations, modules, and the rollout that turns them into tokens."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.drafter.config import DominoHeadConfig as DominoHeadConfig
    from domino_spec.drafter.config import DrafterConfig as DrafterConfig
    from domino_spec.drafter.config import Eagle3Config as Eagle3Config
    from domino_spec.drafter.config import HeadConfig as HeadConfig
    from domino_spec.drafter.config import MarkovHeadConfig as MarkovHeadConfig
    from domino_spec.drafter.config import MedusaConfig as MedusaConfig
    from domino_spec.drafter.config import ModuleConfig as ModuleConfig
    from domino_spec.drafter.config import default_target_layer_ids as default_target_layer_ids
    from domino_spec.drafter.eagle3 import Eagle3 as Eagle3
    from domino_spec.drafter.heads import Head as Head
    from domino_spec.drafter.medusa import Medusa as Medusa
    from domino_spec.drafter.model import DraftModel as DraftModel
    from domino_spec.drafter.model import DraftModule as DraftModule
    from domino_spec.drafter.model import TargetVocabulary as TargetVocabulary
    from domino_spec.drafter.rollout import greedy as greedy
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "config": "DrafterConfig default_target_layer_ids DominoHeadConfig Eagle3Config "
            "HeadConfig MarkovHeadConfig MedusaConfig ModuleConfig",
            "eagle3": "Eagle3",
            "heads": "Head",
            "medusa": "Medusa",
            "model": "DraftModel DraftModule TargetVocabulary",
            "rollout": "greedy",
        },
    )
