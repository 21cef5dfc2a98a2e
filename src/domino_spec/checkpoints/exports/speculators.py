"""The speculators layout: the head in a container of its own, the target named in the config.

Like that project's own checkpoints it repeats nothing of the target, except the lm_head rows of
a reduced vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from domino_spec.checkpoints.exports.form import Form, Source, lm_head_rows
from domino_spec.checkpoints.folder import public_tensors
from domino_spec.checkpoints.names import LM_HEAD, MEMBERS, SPECULATORS_HEAD, is_head
from domino_spec.checkpoints.public import DFLASH_ARCHITECTURE, DOMINO_ARCHITECTURE
from domino_spec.checkpoints.speculators import TYPE_FIELD
from domino_spec.checkpoints.transformer import write_transformer
from domino_spec.drafter import DominoHeadConfig, DrafterConfig
from domino_spec.errors import ExportError


def check(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """Refuse heads that the layout has no name for."""
    if config.head is not None and not isinstance(config.head, DominoHeadConfig):
        raise ExportError(
            f"the drafter has a {config.head.kind} head; the speculators layout knows Domino heads "
            "and drafters without one. Write the public layout (--to hf) instead."
        )


def write(source: Source, folder: Path) -> Path:
    """Write the speculators layout."""
    drafter, shape = source.drafter, source.config
    check(shape, source.dtype)
    tensors = {
        SPECULATORS_HEAD + name if is_head(name) else name: tensor
        for name, tensor in public_tensors(drafter).items()
    }
    if drafter.draft_tokens is not None:
        tensors[LM_HEAD] = lm_head_rows(source, "speculators")
        members = torch.zeros(shape.vocab_size, dtype=torch.bool)
        members[drafter.draft_tokens.cpu()] = True
        tensors[MEMBERS] = members
    return source.write(folder, tensors=tensors, config=_written(source))


def _written(source: Source) -> dict[str, Any]:
    shape, head = source.config, source.config.head
    kind = DominoHeadConfig.kind if head else "dflash"
    values: dict[str, Any] = {
        "architectures": [DOMINO_ARCHITECTURE if head else DFLASH_ARCHITECTURE],
        TYPE_FIELD: kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.max_depth}
            ],
            "verifier": {
                "name_or_path": source.provenance.target_id if source.provenance else None,
                "architectures": [],
            },
        },
        "transformer_layer_config": write_transformer(shape),
        "dtype": source.dtype_name,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "block_size": shape.block_size,
        "draft_vocab_size": shape.output_vocab_size,
        "mask_token_id": shape.mask_token_id,
        "num_target_layers": shape.num_target_layers,
        "sample_from_anchor": shape.shift_label,
        "sliding_window_non_causal": not shape.causal_window,
    }
    if isinstance(head, DominoHeadConfig):
        values |= {
            "gru_hidden_dim": head.gru_hidden_dim,
            "logits_correction_emb_dim": head.emb_dim,
            "pure_draft_prefix_len": head.pure_draft_prefix_len,
        }
    return values


SPECULATORS = Form(
    description="the layout of the speculators project",
    check=check,
    write=write,
    stores_lm_head=True,
)
