"""Checkpoints: layouts that are read, formats that are written, what a drafter fits."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.checkpoints.description import Description as Description
    from domino_spec.checkpoints.description import describe as describe
    from domino_spec.checkpoints.exports import export_drafter as export_drafter
    from domino_spec.checkpoints.exports import find_format as find_format
    from domino_spec.checkpoints.files import released_folder as released_folder
    from domino_spec.checkpoints.files import released_names as released_names
    from domino_spec.checkpoints.fit import Check as Check
    from domino_spec.checkpoints.fit import TargetFacts as TargetFacts
    from domino_spec.checkpoints.fit import check_fit as check_fit
    from domino_spec.checkpoints.fit import require_fit as require_fit
    from domino_spec.checkpoints.packing import Packing as Packing
    from domino_spec.checkpoints.provenance import FORMAT_VERSION as FORMAT_VERSION
    from domino_spec.checkpoints.provenance import Provenance as Provenance
    from domino_spec.checkpoints.provenance import (
        chat_template_fingerprint as chat_template_fingerprint,
    )
    from domino_spec.checkpoints.provenance import tokenizer_fingerprint as tokenizer_fingerprint
    from domino_spec.checkpoints.read import Checkpoint as Checkpoint
    from domino_spec.checkpoints.read import load_drafter as load_drafter
    from domino_spec.checkpoints.write import save_drafter as save_drafter
    from domino_spec.checkpoints.write import save_packed as save_packed
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "exports": "export_drafter find_format",
            "files": "released_folder released_names",
            "fit": "Check TargetFacts check_fit require_fit",
            "packing": "Packing",
            "provenance": "FORMAT_VERSION Provenance chat_template_fingerprint "
            "tokenizer_fingerprint",
            "read": "Checkpoint load_drafter",
            "description": "Description describe",
            "write": "save_drafter save_packed",
        },
    )
