"""Qwen3-MoE: Qwen3 with experts in place of MLPs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from domino_spec.engine.kernels.experts import Gate
from domino_spec.engine.mixture import MixtureModel
from domino_spec.engine.models.base import read_activation
from domino_spec.targets import Target


class Qwen3MoeModel(MixtureModel):
    """The likeliest experts of all, weighted by their chances."""

    reference_class = Qwen3MoeForCausalLM
    block_class: ClassVar[type[nn.Module]] = Qwen3MoeSparseMoeBlock
    """Of a layer's router and experts."""
    router_class, experts_class = Qwen3MoeTopKRouter, Qwen3MoeExperts

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)
        self._normalises = bool(getattr(target.config, "norm_topk_prob", True))

    @classmethod
    def router_of(cls, layer: Any) -> Any:
        """Some layers may be plain."""
        return layer.mlp.gate if isinstance(layer.mlp, cls.block_class) else None

    @staticmethod
    def adopt_experts(layer: Any) -> dict[str, Any]:
        """Where they lie."""
        return {
            "router": layer.mlp.gate.weight.detach(),
            "gate_up": layer.mlp.experts.gate_up_proj.detach(),
            "down": layer.mlp.experts.down_proj.detach(),
        }

    @staticmethod
    def read_gate(target: Target) -> Gate:
        """As plain MLPs are."""
        return Gate(read_activation(target.config))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """In float32, as Transformers does."""
        chances = F.softmax(logits, dim=-1, dtype=torch.float32)
        best, chosen = chances.topk(self._chosen, dim=-1)
        if self._normalises:
            best = best / best.sum(dim=-1, keepdim=True)
        return chosen, best.to(logits.dtype)
