"""Qwen3-Next: a hybrid with experts, whose input projections lie by key head."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextExperts,
    Qwen3NextGatedDeltaNet,
    Qwen3NextSparseMoeBlock,
    Qwen3NextTopKRouter,
)

from domino_spec.engine.hybrid import HybridMixtureModel, by_head


class Qwen3NextModel(HybridMixtureModel):
    """What a key head and its value heads read lies together."""

    reference_class = Qwen3NextForCausalLM
    block_class = Qwen3NextSparseMoeBlock
    router_class, experts_class = Qwen3NextTopKRouter, Qwen3NextExperts
    delta_class = Qwen3NextGatedDeltaNet
    delta_inputs = ("in_proj_qkvz", "in_proj_ba")

    def split_inputs(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, values and gates of each key head; then its logits and steps."""
        delta = self.delta
        heads = delta.value_heads // delta.key_heads  # of each key head
        wide = heads * delta.value_dim
        both, scalars = joined.tensor_split([delta.channels + delta.value_width], dim=-1)
        parts = torch.split(
            by_head(both, delta.key_heads),
            [delta.key_dim, delta.key_dim, wide, wide],
            dim=-1,
        )
        query, key, value, gate = (part.flatten(-2) for part in parts)
        share, step = by_head(scalars, delta.key_heads).chunk(2, dim=-1)
        inputs = torch.cat((query, key, value), dim=-1)
        return inputs, by_head(gate, delta.value_heads), share.flatten(-2), step.flatten(-2)
