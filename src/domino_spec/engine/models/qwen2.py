"""Qwen2: Llama with biases on query, key and value, which `adopt_layer` finds."""

from __future__ import annotations

from transformers import Qwen2ForCausalLM

from domino_spec.engine.models.llama import LlamaModel


class Qwen2Model(LlamaModel):
    """Llama's layers."""

    reference_class = Qwen2ForCausalLM
