"""The public layout as SGLang serves it without a plugin (0.5.20 to 0.5.23 were read).

It takes the alignment of a Domino head from `shift_label` and drafts B-1 tokens either way; a
drafter without a head is always read without shift. Whether sliding layers are causal inside the
block it takes from a top-level `is_causal`, not from `dflash_config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from domino_spec.checkpoints.exports.form import Form, Source
from domino_spec.checkpoints.folder import public_tensors
from domino_spec.checkpoints.public import DFLASH_ARCHITECTURE, write_public
from domino_spec.drafter import DominoHeadConfig, DrafterConfig
from domino_spec.drafter.config import SLIDING_ATTENTION
from domino_spec.errors import ExportError

PREFIX_LEN = 1
"""The one pure_draft_prefix_len that SGLang's rollout knows."""
HEAD_DTYPE = torch.bfloat16
"""The one type that SGLang runs a head in."""


def check(config: DrafterConfig, dtype: torch.dtype) -> None:
    """Refuse what SGLang would refuse at start, or worse, serve as something else."""
    head = config.head
    if config.draft_vocab_size is not None:
        raise ExportError(
            f"the drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens; SGLang "
            "serves the target's whole vocabulary only and would ignore the map. Train a drafter "
            "for the whole vocabulary, or serve this one with vLLM (--to vllm)."
        )
    if head is None:
        if config.shift_label:
            raise ExportError(
                "the drafter has no head and shifted labels (slot 0 predicts the first draft); "
                "SGLang reads a drafter without a head from slot 1 on, and almost no draft would "
                "be accepted. Train it without shift, or with a Domino head."
            )
        return
    if not isinstance(head, DominoHeadConfig):
        raise ExportError(
            f"the drafter has a {head.kind} head; SGLang serves Domino heads, or none, with DFLASH."
        )
    if head.pure_draft_prefix_len != PREFIX_LEN:
        raise ExportError(
            f"pure_draft_prefix_len is {head.pure_draft_prefix_len}; SGLang's rollout expects "
            f"{PREFIX_LEN}. Train with pure_draft_prefix_len {PREFIX_LEN}, or serve this drafter "
            "with vLLM (--to vllm)."
        )
    if dtype != HEAD_DTYPE:
        raise ExportError(
            f"the weights would be stored as {str(dtype).removeprefix('torch.')}; SGLang runs a "
            "Domino head in bfloat16 only. Leave --dtype out, or set it to bfloat16."
        )


def write(source: Source, folder: Path) -> Path:
    """Write what SGLang loads as a DFlash draft model."""
    check(source.config, source.dtype)
    config = served_config(source.config, dtype=source.dtype_name)
    return source.write(folder, tensors=public_tensors(source.drafter), config=config)


def served_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that SGLang reads, for a drafter of this shape."""
    config = write_public(shape, dtype=dtype)
    config["architectures"] = [DFLASH_ARCHITECTURE]
    if SLIDING_ATTENTION in shape.layer_types and not shape.causal_window:
        # Left out, its sliding layers are causal and its full ones are not.
        config["is_causal"] = False
    return config


SGLANG = Form(
    description="what SGLang 0.5.20 and later serve with --speculative-algorithm DFLASH",
    check=check,
    write=write,
)
