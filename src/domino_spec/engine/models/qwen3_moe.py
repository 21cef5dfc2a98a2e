"""Qwen3-MoE: Qwen3 with experts in place of MLPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.kernels.experts import Experts, route, run_experts, unsupported_experts
from domino_spec.engine.kernels.linear import Normed, linear, normed
from domino_spec.engine.kernels.packing import Weight
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.models.llama import LlamaModel
from domino_spec.engine.weights import AttentionWeights, LayerWeights, adopt_attention, adopt_layer
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeWeights(AttentionWeights):
    """A layer with experts."""

    router: Weight  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]: gate, up
    down: Tensor  # [experts, hidden, intermediate]


class Qwen3MoeModel(LlamaModel):
    """Llama's layers, whose MLPs are sums of a few of many; some may be plain."""

    reference_class = Qwen3MoeForCausalLM
    layers: Sequence[LayerWeights | Qwen3MoeWeights]  # type: ignore[assignment]

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)
        self._chosen = int(target.config.num_experts_per_tok)
        self._normalises = bool(target.config.norm_topk_prob)

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:
        """Experts have no linear layers."""
        every = super().projections(layer)
        sparse = isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)
        return tuple(name for name in every if not (sparse and name.startswith("mlp.")))

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """Beyond what all refuse: experts that are not Transformers' own."""
        sparse = [
            layer.mlp for layer in target.layers if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)
        ]
        modules = {Qwen3MoeExperts: [mlp.experts for mlp in sparse]}
        modules[Qwen3MoeTopKRouter] = [mlp.gate for mlp in sparse]
        return unsupported_experts(target, modules) or super().unsupported_reason(target)

    @staticmethod
    def adopt_layer(layer: Any) -> Any:
        """All of its weights; those of experts lie together already."""
        if not isinstance(layer.mlp, Qwen3MoeSparseMoeBlock):
            return adopt_layer(layer)
        return Qwen3MoeWeights(
            **vars(adopt_attention(layer)),
            router=layer.mlp.gate.weight.detach(),
            gate_up=layer.mlp.experts.gate_up_proj.detach(),
            down=layer.mlp.experts.down_proj.detach(),
        )

    @property
    def nbytes(self) -> int:
        """A token reads the experts that are chosen for it alone."""
        sparse = [weights for weights in self.layers if isinstance(weights, Qwen3MoeWeights)]
        experts = sum(weights.gate_up.nbytes + weights.down.nbytes for weights in sparse)
        count = len(sparse[0].gate_up) if sparse else 1
        return super().nbytes - experts + experts * self._chosen // count

    def run_layer(
        self, index: int, states: Normed, metadata: AttentionMetadata, out: Tensor | None
    ) -> Normed:
        """Router and experts read the same normed states."""
        weights, shape = self.layers[index], self.shape
        if not isinstance(weights, Qwen3MoeWeights):
            return super().run_layer(index, states, metadata, out)
        mixed = self.attend(index, states, metadata)
        rows = linear(mixed, weights.out, bias=weights.out_bias, residual=states.rows)
        x = rms_norm(rows, weights.post_norm, shape.eps)
        chances = F.softmax(linear(x, weights.router), dim=-1, dtype=torch.float32)
        best, chosen = chances.topk(self._chosen, dim=-1)
        if self._normalises:
            best = best / best.sum(dim=-1, keepdim=True)
        routing = route(chosen, best.to(x.dtype), len(weights.gate_up))
        experts = Experts(gate_up=weights.gate_up, down=weights.down)
        added = run_experts(x, routing, experts, activation=shape.activation)
        return normed(torch.add(rows, added, out=out), self.norm_after(index), shape.eps)
