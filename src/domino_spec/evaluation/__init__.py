"""Evaluation: how many tokens a cycle a drafter gives, simulated or decoded."""

from domino_spec.evaluation.continuations import Continuations, continue_prompts, fingerprint
from domino_spec.evaluation.protocol import (
    Measurement,
    PromptSet,
    Protocol,
    continuations_for,
    corpus_prompts,
    measure_decoded,
    measure_simulated,
)
from domino_spec.evaluation.simulate import Simulation, simulate, without_head

__all__ = [
    "Continuations",
    "Measurement",
    "PromptSet",
    "Protocol",
    "Simulation",
    "continuations_for",
    "continue_prompts",
    "corpus_prompts",
    "fingerprint",
    "measure_decoded",
    "measure_simulated",
    "simulate",
    "without_head",
]
