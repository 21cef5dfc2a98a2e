"""Models by shape alone, for measurements that need no trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    DraftModel,
    default_target_layer_ids,
)
from domino_spec.errors import InputError
from domino_spec.quantization import ScaledKind
from domino_spec.targets import Target, probe_target
from domino_spec.targets.weight_only import check_fp8, round_model

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "tiny": {
        **_QWEN3, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "tie_word_embeddings": True,
    },
}  # fmt: skip


def target_config(shape: str) -> Any:
    """A configuration by name, or from a config.json."""
    if shape in SHAPES:
        values = dict(SHAPES[shape])
    elif Path(shape).is_file():
        values = json.loads(Path(shape).read_text(encoding="utf-8"))
    else:
        raise InputError(
            f"no shape is called {shape!r}; expected one of {', '.join(SHAPES)}, or the path of a "
            "config.json."
        )
    kind = values.pop("model_type")
    return transformers.AutoConfig.for_model(kind, **values, eos_token_id=None, bos_token_id=None)


def drafter_config(target: Any) -> DrafterConfig:
    """The public Domino drafters' shape for it: five layers as wide as the target's, 16 slots."""
    layers = int(target.num_hidden_layers)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=5,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None)
        or target.hidden_size // target.num_attention_heads,
        vocab_size=target.vocab_size,
        num_target_layers=layers,
        target_layer_ids=default_target_layer_ids(layers),
        mask_token_id=target.vocab_size - 1,
        block_size=16,
        shift_label=True,
        head=DominoHeadConfig(emb_dim=256, gru_hidden_dim=1024, pure_draft_prefix_len=1),
    )


def random_target(
    shape: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: ScaledKind | None = None,
) -> Target:
    """A target of this shape with random weights, perhaps its layers' in few bits."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(target_config(shape), dtype=dtype)
    if quantize is not None:
        check_fp8(quantize, shape, device)
        model = round_model(model, quantize, shape, device)
    target = Target(model.eval(), name=f"{shape} shape, random weights")
    probe_target(target)
    return target


@torch.no_grad()
def random_drafter(target: Target) -> DraftModel:
    """A drafter of the public shape for a target, made where the target is."""
    with torch.device(target.device):
        drafter = DraftModel(drafter_config(target.config)).to(target.dtype)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02)
    return drafter.eval()
