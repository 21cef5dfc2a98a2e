"""Phi-3 and Phi-4: Llama with fused projections, perhaps with a part of each head rotated."""

from __future__ import annotations

from typing import Any

from transformers import Phi3ForCausalLM

from domino_spec.engine.models.llama import LlamaModel
from domino_spec.engine.weights import LayerWeights, own


class Phi3Model(LlamaModel):
    """Llama's layers, whose projections are joined as they come."""

    reference_class = Phi3ForCausalLM

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:  # noqa: ARG003
        """Half as many as Llama's."""
        return ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")

    @staticmethod
    def adopt_layer(layer: Any) -> LayerWeights:
        """All of its weights."""
        return LayerWeights(
            input_norm=own(layer.input_layernorm.weight),
            qkv=own(layer.self_attn.qkv_proj.weight),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=own(layer.self_attn.o_proj.weight),
            out_bias=None,
            post_norm=own(layer.post_attention_layernorm.weight),
            gate_up=own(layer.mlp.gate_up_proj.weight),
            down=own(layer.mlp.down_proj.weight),
        )
