"""The public layout for vLLM with our plugin: `--speculative-config` with method dflash or dspark.

A Domino drafter is named `DominoDraftModel`, so that a vLLM without the plugin refuses it; a
drafter without a head is `DFlashDraftModel`, which vLLM serves by itself. The dspark form differs
in its config alone: vLLM chooses that speculator by the architecture's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from domino_spec.checkpoints.exports.form import Form, Source, lm_head_rows
from domino_spec.checkpoints.folder import public_tensors
from domino_spec.checkpoints.names import LM_HEAD
from domino_spec.checkpoints.public import (
    DOMINO_ARCHITECTURE,
    DSPARK_ARCHITECTURE,
    SECTION,
    write_public,
)
from domino_spec.drafter import DominoHeadConfig, DrafterConfig
from domino_spec.errors import ExportError


def check(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """Refuse what vLLM would serve as something else without a word."""
    if config.head is None and config.shift_label:
        raise ExportError(
            "the drafter has no head and shifted labels (slot 0 predicts the first draft); a vLLM "
            "without our plugin would take it for a plain drafter, read it from slot 1 on, and "
            "accept almost nothing. Export it --to hf and serve it with the plugin only."
        )


def check_dspark(config: DrafterConfig, dtype: torch.dtype) -> None:  # noqa: ARG001
    """The speculator asks a head for a correction after every token."""
    if config.head is None:
        raise ExportError(
            "the drafter has no head, and vLLM's dspark method asks one for a correction after "
            "every token. Write it for the dflash method (--to vllm)."
        )


def write(source: Source, folder: Path) -> Path:
    """Write what vLLM loads as a draft model for its dflash method."""
    check(source.config, source.dtype)
    return _write(source, folder, served_config(source.config, dtype=source.dtype_name))


def write_dspark(source: Source, folder: Path) -> Path:
    """The same for its dspark method."""
    check_dspark(source.config, source.dtype)
    config = served_config(source.config, dtype=source.dtype_name)
    return _write(source, folder, config | dspark_fields(source.config))


def served_config(shape: DrafterConfig, *, dtype: str) -> dict[str, Any]:
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


def dspark_fields(shape: DrafterConfig) -> dict[str, Any]:
    """What the dspark method wants besides: its name, and whether slot 0 gives a draft."""
    return {
        "architectures": [DSPARK_ARCHITECTURE],
        "sample_from_anchor": shape.shift_label,  # from vLLM 0.27 on
        "dspark_bonus_anchor": not shape.shift_label,  # before
    }


def _write(source: Source, folder: Path, config: dict[str, Any]) -> Path:
    tensors = public_tensors(source.drafter)
    if source.config.draft_vocab_size is not None:
        tensors[LM_HEAD] = lm_head_rows(source, "vLLM")
    return source.write(folder, tensors=tensors, config=config)


VLLM = Form(
    description="what vLLM with our plugin serves with --speculative-config, method dflash",
    check=check,
    write=write,
    stores_lm_head=True,
)

VLLM_DSPARK = Form(
    description="the same for method dspark, whose sampled drafts see each other (V2 runner)",
    check=check_dspark,
    write=write_dspark,
    stores_lm_head=True,
)
