"""Qwen3-MoE: Qwen3 with experts in place of MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from domino_spec.engine.kernels.experts import Gate
from domino_spec.engine.mixture import MixtureModel, MixtureWeights
from domino_spec.engine.models.base import read_activation
from domino_spec.engine.weights import adopt_attention
from domino_spec.targets import Target


class Qwen3MoeModel(MixtureModel):
    """The likeliest experts of all, weighted by their chances."""

    reference_class = Qwen3MoeForCausalLM
    router_class, experts_class = Qwen3MoeTopKRouter, Qwen3MoeExperts

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)
        self._normalises = bool(target.config.norm_topk_prob)

    @staticmethod
    def router_of(layer: Any) -> Any:
        """Some layers may be plain."""
        return layer.mlp.gate if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) else None

    @staticmethod
    def adopt_mixture(layer: Any) -> MixtureWeights:
        """All of its weights."""
        return MixtureWeights(
            **vars(adopt_attention(layer)),
            router=layer.mlp.gate.weight.detach(),
            gate_up=layer.mlp.experts.gate_up_proj.detach(),
            down=layer.mlp.experts.down_proj.detach(),
        )

    @staticmethod
    def read_gate(config: Any) -> Gate:
        """As plain MLPs are."""
        return Gate(read_activation(config))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """In float32, as Transformers does."""
        chances = F.softmax(logits, dim=-1, dtype=torch.float32)
        best, chosen = chances.topk(self._chosen, dim=-1)
        if self._normalises:
            best = best / best.sum(dim=-1, keepdim=True)
        return chosen, best.to(logits.dtype)
