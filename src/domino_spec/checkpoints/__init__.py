"""Checkpoints: layouts in, forms out, what a drafter fits."""

from domino_spec.checkpoints.exports import export_drafter, find_form
from domino_spec.checkpoints.fit import Check, TargetFacts, check_fit, require_fit
from domino_spec.checkpoints.packing import Packing
from domino_spec.checkpoints.provenance import (
    FORMAT_VERSION,
    Provenance,
    chat_template_fingerprint,
    tokenizer_fingerprint,
)
from domino_spec.checkpoints.read import Checkpoint, Description, describe, load_drafter
from domino_spec.checkpoints.released import released_folder, released_names
from domino_spec.checkpoints.write import save_drafter, save_packed

__all__ = [
    "FORMAT_VERSION",
    "Check",
    "Checkpoint",
    "Description",
    "Packing",
    "Provenance",
    "TargetFacts",
    "chat_template_fingerprint",
    "check_fit",
    "describe",
    "export_drafter",
    "find_form",
    "load_drafter",
    "released_folder",
    "released_names",
    "require_fit",
    "save_drafter",
    "save_packed",
    "tokenizer_fingerprint",
]
