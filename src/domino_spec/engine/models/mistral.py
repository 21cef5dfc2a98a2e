"""Mistral: Llama with a sliding window, which the configuration says."""

from __future__ import annotations

from transformers import MistralForCausalLM

from domino_spec.engine.models.llama import LlamaModel


class MistralModel(LlamaModel):
    """Llama's layers."""

    reference_class = MistralForCausalLM
