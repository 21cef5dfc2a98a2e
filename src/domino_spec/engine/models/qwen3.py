"""Qwen3: Llama with a norm on each query and key head, which `adopt_layer` finds."""

from __future__ import annotations

from transformers import Qwen3ForCausalLM

from domino_spec.engine.models.llama import LlamaModel


class Qwen3Model(LlamaModel):
    """Llama's layers."""

    reference_class = Qwen3ForCausalLM
