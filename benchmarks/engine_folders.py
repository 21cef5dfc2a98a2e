"""Folders that vLLM and SGLang serve: a GGUF target as an ordinary one, drafters, mere shapes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from domino_spec.checkpoints import load_drafter
from domino_spec.checkpoints.exports import FORMATS, export_drafter
from domino_spec.engine.shapes import drafter_config, target_config
from domino_spec.targets import load_target

METHODS = {"dflash": "vllm", "dspark": "vllm-dspark"}
"""vLLM's methods and the export formats that they read."""


def write_target(gguf: Path, folder: Path, *, dtype: torch.dtype) -> Path:
    """A Llama that comes as GGUF, with its tokenizer, as a folder of plain weights."""
    loaded = load_target(gguf, device="cpu", dtype=dtype)
    config = copy.deepcopy(loaded.target.model.config)
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.target.model.state_dict())
    model.to(dtype).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def write_draft(source: str, folder: Path, *, method: str, dtype: torch.dtype) -> Path:
    """A drafter in the form that one of vLLM's methods reads."""
    found = load_drafter(source, dtype=dtype)
    return export_drafter(
        found.drafter, folder, to=METHODS[method], dtype=dtype, provenance=found.provenance
    )


def write_shape(shape: str, folder: Path) -> Path:
    """A target of this shape without weights, for vLLM's `load_format: dummy`."""
    config = target_config(shape)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return folder


def write_draft_shape(shape: str, folder: Path, *, method: str) -> Path:
    """Its drafter, again without weights."""
    drafter = drafter_config(target_config(shape))
    config = FORMATS[METHODS[method]].config(drafter, dtype="bfloat16")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
