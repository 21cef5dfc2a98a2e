"""OLMo 2: norms after attention and MLP, and over whole query and key projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Olmo2ForCausalLM

from domino_spec.engine.attention import AttentionMetadata, run_attention
from domino_spec.engine.kernels.linear import linear
from domino_spec.engine.kernels.packing import Weight, look_up
from domino_spec.engine.models.base import InferenceModel, apply_norm
from domino_spec.engine.weights import LayerTensors, join_weights, joined_bias, own


@dataclass(frozen=True, kw_only=True)
class Olmo2Weights(LayerTensors):
    """One post-norm decoder layer."""

    qkv: Weight  # [(heads + 2 * kv heads) * head_dim, hidden]: query, key, value
    qkv_bias: Tensor | None
    q_norm: Tensor  # [heads * head_dim]
    k_norm: Tensor  # [kv heads * head_dim]
    out: Weight  # [hidden, heads * head_dim]
    out_bias: Tensor | None
    attention_norm: Tensor  # [hidden]
    gate_up: Weight  # [2 * intermediate, hidden]: gate, up
    down: Weight  # [hidden, intermediate]
    mlp_norm: Tensor  # [hidden]


class Olmo2Model(InferenceModel):
    """x + norm(attention(x)), then x + norm(mlp(x)): products read states that are not normed."""

    reference_class = Olmo2ForCausalLM
    layers: Sequence[Olmo2Weights]

    @staticmethod
    def adopt_layer(layer: Any) -> Olmo2Weights:
        """All of its weights, joined where they are read together."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = attention.o_proj.bias
        return Olmo2Weights(
            qkv=join_weights([p.weight for p in projections]),
            qkv_bias=joined_bias([p.bias for p in projections]),
            q_norm=attention.q_norm.weight.detach(),
            k_norm=attention.k_norm.weight.detach(),
            out=own(attention.o_proj.weight),
            out_bias=None if bias is None else bias.detach(),
            attention_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=join_weights([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=own(mlp.down_proj.weight),
            mlp_norm=layer.post_feedforward_layernorm.weight.detach(),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings as they are."""
        return look_up(self.embedding, tokens)

    def run_layer(
        self, index: int, states: Tensor, metadata: AttentionMetadata, out: Tensor | None
    ) -> Tensor:
        """Norms are launches of their own: no product comes right after one."""
        weights, shape = self.layers[index], self.shape
        widths = [len(weights.q_norm), len(weights.k_norm), len(weights.k_norm)]
        query, key, value = torch.split(
            linear(states, weights.qkv, bias=weights.qkv_bias), widths, dim=1
        )
        query = apply_norm(query, weights.q_norm, shape)
        key = apply_norm(key, weights.k_norm, shape)
        mixed = run_attention(
            torch.cat((query, key, value), dim=1),
            self.cache.layer(index), self.rotary[index], metadata, shape,
            causal=True, window=shape.windows[index],
        )  # fmt: skip
        added = linear(mixed, weights.out, bias=weights.out_bias)
        states = states + apply_norm(added, weights.attention_norm, shape)
        gated = linear(states, weights.gate_up, gated=True, activation=shape.activation)
        added = apply_norm(linear(gated, weights.down), weights.mlp_norm, shape)
        return torch.add(states, added, out=out)
