"""Qwen3.5: a hybrid whose linear attention has four input projections."""

from __future__ import annotations

from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from domino_spec.engine.hybrid import HybridModel, split_joined


class Qwen3_5Model(HybridModel):  # noqa: N801
    """Projections lie one after the other."""

    reference_class = Qwen3_5ForCausalLM
    multimodal_class = Qwen3_5ForConditionalGeneration
    delta_class = Qwen3_5GatedDeltaNet
    delta_inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def split_inputs(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One after the other."""
        return split_joined(self, joined)
