"""Forms to export a drafter in, each a module: what it can express and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from domino_spec.checkpoints.exports.form import Form, Source
from domino_spec.checkpoints.exports.hf import HF
from domino_spec.checkpoints.exports.sglang import SGLANG
from domino_spec.checkpoints.exports.speculators import SPECULATORS
from domino_spec.checkpoints.exports.vllm import VLLM, VLLM_DSPARK
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.drafter import Drafter
from domino_spec.errors import InputError

__all__ = ["FORMS", "Form", "Source", "export_drafter", "find_form"]

FORMS: Mapping[str, Form] = {
    "hf": HF,
    "sglang": SGLANG,
    "speculators": SPECULATORS,
    "vllm": VLLM,
    "vllm-dspark": VLLM_DSPARK,
}


def find_form(name: str) -> Form:
    """The form of this name."""
    if name not in FORMS:
        known = ", ".join(f"{name} ({form.description})" for name, form in FORMS.items())
        raise InputError(f"--to is {name!r}; expected one of: {known}.")
    return FORMS[name]


def export_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    to: str,
    dtype: torch.dtype | None = None,
    provenance: Provenance | None = None,
    lm_head: Tensor | None = None,
) -> Path:
    """Write a drafter in the form `to`, and return the folder.

    What the form cannot express is refused. `lm_head` holds the target's rows for a reduced
    vocabulary, [draft vocabulary, hidden]; see `Form.wants_lm_head`.
    """
    source = Source(
        drafter=drafter, dtype=dtype or drafter.dtype, provenance=provenance, lm_head=lm_head
    )
    return find_form(to).write(source, Path(folder))
