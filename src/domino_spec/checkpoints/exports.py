"""Formats to export a drafter in: what each can express, and its config.json and tensors.

- `hf`: the public layout as its first releases have it; our own reader loads it.
- `sglang`: the public layout as SGLang serves it without a plugin (0.5.20 to 0.5.23 were read).
  It takes the alignment of a Domino head from `shift_label` and drafts B-1 tokens either way; a
  drafter without a head is always read without shift. Whether sliding layers are causal inside the
  block it takes from a top-level `is_causal`, not from `dflash_config`.
- `speculators`: the head in a container of its own, the target named in the config. Like that
  project's own checkpoints it repeats nothing of the target, except the lm_head rows of a reduced
  vocabulary.
- `vllm`: the public layout for vLLM with our plugin. A Domino drafter is `DominoDraftModel`, so
  that a vLLM without the plugin refuses it; a drafter without a head is `DFlashDraftModel`, which
  vLLM serves by itself.
- `vllm-dspark` differs in its config alone: vLLM chooses that method by the architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.checkpoints.layouts import (
    DFLASH_ARCHITECTURE,
    DOMINO_ARCHITECTURE,
    DSPARK_ARCHITECTURE,
    SECTION,
    TYPE_FIELD,
    write_public,
    write_transformer,
)
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.checkpoints.tensors import LM_HEAD, MEMBERS, SPECULATORS_HEAD, is_head
from domino_spec.checkpoints.write import dtype_name, public_tensors, write_folder
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.drafter.config import SLIDING_ATTENTION
from domino_spec.errors import ExportError, InputError

SGLANG_PREFIX_LEN = 1
"""The one pure_draft_prefix_len that SGLang's rollout knows."""
SGLANG_HEAD_DTYPE = torch.bfloat16
"""The one type that SGLang runs a head in."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One format of checkpoint."""

    description: str
    config: Callable[..., dict[str, Any]]
    """config.json for a DrafterConfig and `dtype`, the name of the weights' type."""
    check: Callable[[DrafterConfig, torch.dtype], None] = lambda _config, _dtype: None
    """Raises where the format cannot express a drafter."""
    stores_lm_head: str = ""
    """Whose checkpoints hold the target's lm_head rows of a reduced vocabulary; empty if not."""
    head_prefix: str = ""
    """Before the names of a head's tensors."""
    stores_members: bool = False
    """Whether a reduced vocabulary comes with a mask over the target's ids."""

    def wants_lm_head(self, config: DrafterConfig) -> bool:
        """Whether writing this drafter takes rows of the target's lm_head."""
        return bool(self.stores_lm_head) and config.draft_vocab_size is not None


def export_drafter(
    drafter: DraftModel,
    folder: str | Path,
    *,
    to: str,
    dtype: torch.dtype | None = None,
    provenance: Provenance | None = None,
    lm_head: Tensor | None = None,
) -> Path:
    """Write a drafter in the format `to`, and return the folder.

    What the format cannot express is refused. `lm_head` holds the target's rows for a reduced
    vocabulary, [draft vocabulary, hidden]; see `ExportFormat.wants_lm_head`.
    """
    chosen, dtype = find_format(to), dtype or drafter.dtype
    shape = drafter.config
    chosen.check(shape, dtype)
    config = chosen.config(shape, dtype=dtype_name(dtype))
    if to == "speculators" and provenance is not None:
        config["speculators_config"]["verifier"]["name_or_path"] = provenance.target_id
    tensors = {
        chosen.head_prefix + name if is_head(name) else name: tensor
        for name, tensor in public_tensors(drafter).items()
    }
    if chosen.wants_lm_head(shape):
        tensors[LM_HEAD] = _lm_head_rows(lm_head, shape, chosen.stores_lm_head)
    if chosen.stores_members and drafter.draft_tokens is not None:
        members = torch.zeros(shape.vocab_size, dtype=torch.bool)
        members[drafter.draft_tokens.cpu()] = True
        tensors[MEMBERS] = members
    return write_folder(folder, tensors=tensors, config=config, dtype=dtype, provenance=provenance)


def find_format(name: str) -> ExportFormat:
    """The format of this name."""
    if name not in FORMATS:
        known = ", ".join(f"{name} ({each.description})" for name, each in FORMATS.items())
        raise InputError(f"--to is {name!r}; expected one of: {known}.")
    return FORMATS[name]


def _lm_head_rows(rows: Tensor | None, config: DrafterConfig, owner: str) -> Tensor:
    """The rows that a reduced vocabulary needs; missing or mis-shaped ones are refused."""
    expected = (config.output_vocab_size, config.hidden_size)
    if rows is None:
        raise ExportError(
            f"the drafter proposes {config.draft_vocab_size} of {config.vocab_size} tokens, and a "
            f"{owner} checkpoint of a reduced vocabulary holds the target's lm_head rows for them, "
            "which the drafter has not. Name its target (--target TARGET)."
        )
    if tuple(rows.shape) != expected:
        raise ExportError(
            f"the lm_head rows are {list(rows.shape)}; expected {list(expected)}, one row for each "
            "token of the reduced vocabulary. They are another target's."
        )
    return rows


def _check_order(config: DrafterConfig, engine: str) -> None:
    """Both engines join the states in the order in which they come."""
    ids = config.target_layer_ids
    if list(ids) != sorted(ids):
        raise ExportError(
            f"target_layer_ids are {list(ids)}; {engine} joins captured states in the order of the "
            "target's layers, so that its drafts would be wrong. Serve this drafter with our "
            "own engine, or train it with ids that increase."
        )


def check_sglang(config: DrafterConfig, dtype: torch.dtype) -> None:
    """Refuse what SGLang would refuse at start, or worse, serve as something else."""
    head = config.head
    _check_order(config, "SGLang")
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
    if head.pure_draft_prefix_len != SGLANG_PREFIX_LEN:
        raise ExportError(
            f"pure_draft_prefix_len is {head.pure_draft_prefix_len}; SGLang's rollout expects "
            f"{SGLANG_PREFIX_LEN}. Train with pure_draft_prefix_len {SGLANG_PREFIX_LEN}, or serve "
            "this drafter with vLLM (--to vllm)."
        )
    if dtype != SGLANG_HEAD_DTYPE:
        raise ExportError(
            f"the weights would be stored as {str(dtype).removeprefix('torch.')}; SGLang runs a "
            "Domino head in bfloat16 only. Leave --dtype out, or set it to bfloat16."
        )


def sglang_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that SGLang reads, for a drafter of this shape."""
    config = write_public(shape, dtype=dtype)
    config["architectures"] = [DFLASH_ARCHITECTURE]
    if SLIDING_ATTENTION in shape.layer_types and not shape.causal_window:
        # Left out, its sliding layers are causal and its full ones are not.
        config["is_causal"] = False
    return config


def check_speculators(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """Refuse heads that the layout has no name for."""
    if config.head is not None and not isinstance(config.head, DominoHeadConfig):
        raise ExportError(
            f"the drafter has a {config.head.kind} head; the speculators layout knows Domino heads "
            "and drafters without one. Write the public layout (--to hf) instead."
        )


def speculators_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json of the speculators project, for a target that is not named yet."""
    head = shape.head
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
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": write_transformer(shape),
        "dtype": dtype,
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


def check_vllm(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """Refuse what vLLM would serve as something else without a word."""
    _check_order(config, "vLLM")
    if config.head is None and config.shift_label:
        raise ExportError(
            "the drafter has no head and shifted labels (slot 0 predicts the first draft); a vLLM "
            "without our plugin would take it for a plain drafter, read it from slot 1 on, and "
            "accept almost nothing. Export it --to hf and serve it with the plugin only."
        )


def vllm_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that vLLM with our plugin reads, for a drafter of this shape."""
    config = write_public(shape, dtype=dtype)
    if isinstance(shape.head, DominoHeadConfig):
        config["architectures"] = [DOMINO_ARCHITECTURE]
    if shape.causal_window and len(set(shape.layer_types)) > 1:
        # vLLM's `causal` covers full layers too; left out, only its sliding ones are causal.
        config[SECTION]["causal_window"] = config[SECTION].pop("causal")
    if shape.draft_vocab_size is not None:
        config["has_own_lm_head"] = True
    return config


def check_dspark(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """The speculator asks a head for a correction after every token."""
    _check_order(config, "vLLM")
    if config.head is None:
        raise ExportError(
            "the drafter has no head, and vLLM's dspark method asks one for a correction after "
            "every token. Write it for the dflash method (--to vllm)."
        )


def dspark_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """The same with the method's name, and whether slot 0 gives a draft."""
    return vllm_config(shape, dtype=dtype) | {
        "architectures": [DSPARK_ARCHITECTURE],
        "sample_from_anchor": shape.shift_label,  # from vLLM 0.27 on
        "dspark_bonus_anchor": not shape.shift_label,  # before
    }


FORMATS: Mapping[str, ExportFormat] = {
    "hf": ExportFormat(
        description="the public layout of DFlash and Domino checkpoints", config=write_public
    ),
    "sglang": ExportFormat(
        description="what SGLang 0.5.20 and later serve with --speculative-algorithm DFLASH",
        check=check_sglang,
        config=sglang_config,
    ),
    "speculators": ExportFormat(
        description="the layout of the speculators project",
        check=check_speculators,
        config=speculators_config,
        stores_lm_head="speculators",
        head_prefix=SPECULATORS_HEAD,
        stores_members=True,
    ),
    "vllm": ExportFormat(
        description="what vLLM with our plugin serves with --speculative-config, method dflash",
        check=check_vllm,
        config=vllm_config,
        stores_lm_head="vLLM",
    ),
    "vllm-dspark": ExportFormat(
        description="the same for method dspark, whose sampled drafts see each other (V2 runner)",
        check=check_dspark,
        config=dspark_config,
        stores_lm_head="vLLM",
    ),
}
