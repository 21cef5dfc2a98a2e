"""Checkpoints: public and speculators layouts in, the public layout out, and what fits what."""

from domino_spec.checkpoints.fit import Check, TargetFacts, check_fit, require_fit
from domino_spec.checkpoints.provenance import (
    FORMAT_VERSION,
    Provenance,
    chat_template_fingerprint,
    tokenizer_fingerprint,
)
from domino_spec.checkpoints.read import Checkpoint, Description, describe, load_drafter
from domino_spec.checkpoints.write import save_drafter

__all__ = [
    "FORMAT_VERSION",
    "Check",
    "Checkpoint",
    "Description",
    "Provenance",
    "TargetFacts",
    "chat_template_fingerprint",
    "check_fit",
    "describe",
    "load_drafter",
    "require_fit",
    "save_drafter",
    "tokenizer_fingerprint",
]
