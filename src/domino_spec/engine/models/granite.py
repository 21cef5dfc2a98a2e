"""Granite: Llama with factors on embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GraniteForCausalLM

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.kernels.linear import Normed, linear, normed
from domino_spec.engine.kernels.packing import Matrix, ScaledEmbedding, Table
from domino_spec.engine.models.base import Shape, read_shape
from domino_spec.engine.models.llama import LlamaModel
from domino_spec.targets import Target


class GraniteModel(LlamaModel):
    """Llama's layers, each residual added with a factor."""

    reference_class = GraniteForCausalLM
    applies_scales = True

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)
        self._residual_multiplier = float(target.config.residual_multiplier)

    @staticmethod
    def read_shape(config: Any) -> Shape:
        """Attention has a scale of its own."""
        return replace(read_shape(config), scale=float(config.attention_multiplier))

    @staticmethod
    def adopt_vocabulary(embedding: Matrix, lm_head: Matrix, config: Any) -> tuple[Table, Matrix]:
        """With the factors: drafters read these tables too. The lm_head is a copy."""
        assert isinstance(embedding, Tensor), "no such target is loaded with quantised weights"
        assert isinstance(lm_head, Tensor)
        scaled = ScaledEmbedding(embedding, float(config.embedding_multiplier))
        return scaled, lm_head / config.logits_scaling

    def run_layer(
        self, index: int, states: Normed, metadata: AttentionMetadata, out: Tensor | None
    ) -> Normed:
        """As Llama's, but for the factors between products and residuals."""
        weights, shape, factor = self.layers[index], self.shape, self._residual_multiplier
        mixed = self.attend(index, states, metadata)
        added = linear(mixed, weights.out, bias=weights.out_bias)
        states = normed(states.rows + added * factor, weights.post_norm, shape.eps)
        gated = linear(states, weights.gate_up, gated=True, activation=shape.activation)
        rows = torch.add(states.rows, linear(gated, weights.down) * factor, out=out)
        return normed(rows, self.norm_after(index), shape.eps)
