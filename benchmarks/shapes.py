"""Models by shape alone, for measurements that need no trained weights."""

from __future__ import annotations

from typing import Any

import transformers

from domino_spec.drafter import DominoHeadConfig, DrafterConfig

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def target_config(shape: str) -> transformers.Qwen3Config:
    """A Qwen3 of this shape."""
    return transformers.Qwen3Config(
        **SHAPES[shape], eos_token_id=None, bos_token_id=None, max_position_embeddings=40960
    )


def drafter_config(shape: str) -> DrafterConfig:
    """The public Domino drafters' shape for it: five layers as wide as the target's, 16 slots."""
    values = SHAPES[shape]
    layers = values["num_hidden_layers"]
    return DrafterConfig(
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=5,
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab_size"],
        num_target_layers=layers,
        target_layer_ids=tuple(round(1 + i * (layers - 4) / 4) for i in range(5)),
        mask_token_id=values["vocab_size"] - 1,
        block_size=16,
        shift_label=True,
        head=DominoHeadConfig(emb_dim=256, gru_hidden_dim=1024, pure_draft_prefix_len=1),
    )
