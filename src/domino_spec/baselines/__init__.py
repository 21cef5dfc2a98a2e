"""Baselines: other drafters behind the same interface, to be compared and trained alike."""

from domino_spec.baselines.config import BaselineConfig, Eagle3Config, MedusaConfig
from domino_spec.baselines.eagle3 import Eagle3
from domino_spec.baselines.eagle3_proposer import Eagle3Proposer
from domino_spec.baselines.files import load_baseline, save_baseline
from domino_spec.baselines.lookup import PromptLookup
from domino_spec.baselines.medusa import Medusa, MedusaProposer
from domino_spec.baselines.registry import PLAIN, NamedProposer, open_drafter, short_name

__all__ = [
    "PLAIN",
    "BaselineConfig",
    "Eagle3",
    "Eagle3Config",
    "Eagle3Proposer",
    "Medusa",
    "MedusaConfig",
    "MedusaProposer",
    "NamedProposer",
    "PromptLookup",
    "load_baseline",
    "open_drafter",
    "save_baseline",
    "short_name",
]
