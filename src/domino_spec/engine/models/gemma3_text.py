"""Gemma 3: norms around attention and MLP, two kinds of rotary positions, scaled embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.kernels.linear import Normed, add_normed, linear
from domino_spec.engine.kernels.packing import Matrix, ScaledEmbedding, Table
from domino_spec.engine.models.base import Shape, read_shape
from domino_spec.engine.models.llama import LlamaModel
from domino_spec.engine.weights import LayerWeights, adopt_layer, zero_centred
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class Gemma3Weights(LayerWeights):
    """A layer that norms what attention and MLP read, and what they give before it is added."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]


class Gemma3Model(LlamaModel):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    reference_class = Gemma3ForCausalLM
    multimodal_class = Gemma3ForConditionalGeneration
    embedding_class = Gemma3TextScaledWordEmbedding
    rotary_by_kind = True
    layers: Sequence[Gemma3Weights]

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """Beyond what all refuse: capped scores, and attention in both directions."""
        if target.config.attn_logit_softcapping is not None:
            return "it caps its attention scores"
        if target.config.use_bidirectional_attention:
            return "its tokens see those after them"
        return super().unsupported_reason(target)

    @staticmethod
    def read_shape(config: Any) -> Shape:
        """Attention has a scale of its own."""
        return replace(read_shape(config), scale=float(config.query_pre_attn_scalar) ** -0.5)

    @staticmethod
    def adopt_vocabulary(embedding: Matrix, lm_head: Matrix, config: Any) -> tuple[Table, Matrix]:
        """The embedding's factor is rounded to its type, as Transformers does."""
        factor = torch.tensor(float(config.hidden_size) ** 0.5)
        if isinstance(embedding, Tensor):
            factor = factor.to(embedding.dtype)
        return ScaledEmbedding(embedding, factor.item()), lm_head

    @staticmethod
    def adopt_norm(norm: Any) -> Tensor:
        """One is added to its weights."""
        return zero_centred(norm.weight)

    @staticmethod
    def adopt_layer(layer: Any) -> Gemma3Weights:
        """All of its weights, joined where they are read together."""
        attention, norm = layer.self_attn, Gemma3Model.adopt_norm
        llama = vars(adopt_layer(layer)) | {
            "input_norm": norm(layer.input_layernorm),
            "q_norm": norm(attention.q_norm),
            "k_norm": norm(attention.k_norm),
            "post_norm": norm(layer.pre_feedforward_layernorm),
        }
        return Gemma3Weights(
            **llama,
            attention_norm=norm(layer.post_attention_layernorm),
            mlp_norm=norm(layer.post_feedforward_layernorm),
        )

    def run_layer(
        self, index: int, states: Normed, metadata: AttentionMetadata, out: Tensor | None
    ) -> Normed:
        """As Llama's, but for the norms between products and residuals."""
        weights, shape = self.layers[index], self.shape
        mixed = self.attend(index, states, metadata)
        added = linear(mixed, weights.out, bias=weights.out_bias)
        states = add_normed(
            added, weights.attention_norm, states.rows, weights.post_norm, shape.eps
        )
        gated = linear(states, weights.gate_up, gated=True, activation=shape.activation)
        return add_normed(
            linear(gated, weights.down), weights.mlp_norm, states.rows, self.norm_after(index),
            shape.eps, out=out,
        )  # fmt: skip
