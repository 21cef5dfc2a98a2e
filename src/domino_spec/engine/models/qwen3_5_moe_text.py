"""Qwen3.5 with experts."""

from __future__ import annotations

from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeExperts,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeSparseMoeBlock,
    Qwen3_5MoeTopKRouter,
)

from domino_spec.engine.hybrid import HybridMixtureModel, split_joined


class Qwen3_5MoeModel(HybridMixtureModel):  # noqa: N801
    """Experts in place of MLPs."""

    reference_class = Qwen3_5MoeForCausalLM
    multimodal_class = Qwen3_5MoeForConditionalGeneration
    block_class = Qwen3_5MoeSparseMoeBlock
    router_class, experts_class = Qwen3_5MoeTopKRouter, Qwen3_5MoeExperts
    delta_class = Qwen3_5MoeGatedDeltaNet
    delta_inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def split_inputs(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One after the other."""
        return split_joined(self, joined)
