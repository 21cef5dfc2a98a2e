"""GPT-OSS: attention sinks, biases, and experts whose gates are clamped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from domino_spec.engine.kernels.experts import Gate
from domino_spec.engine.mixture import MixtureModel
from domino_spec.engine.models.base import Rotary
from domino_spec.targets import Target


class GptOssModel(MixtureModel):
    """The experts with the highest logits, weighted by their softmax."""

    reference_class = GptOssForCausalLM
    router_class, experts_class = GptOssTopKRouter, GptOssExperts

    def rotary_tables(self, capacity: int) -> list[Rotary]:
        """Transformers gives angles for half of a head."""
        (cos, sin), *rest = super().rotary_tables(capacity)
        table = (torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1))
        return [table] * (1 + len(rest))

    @staticmethod
    def router_of(layer: Any) -> Any:
        """Every layer has one."""
        return layer.mlp.router

    @staticmethod
    def adopt_experts(layer: Any) -> dict[str, Any]:
        """Experts' matrices are the other way round, which strides say."""
        router, experts = layer.mlp.router, layer.mlp.experts
        return {
            "router": router.weight.detach(),
            "router_bias": router.bias.detach(),
            "gate_up": experts.gate_up_proj.detach().transpose(1, 2),
            "gate_up_bias": experts.gate_up_proj_bias.detach(),
            "down": experts.down_proj.detach().transpose(1, 2),
            "down_bias": experts.down_proj_bias.detach(),
        }

    @staticmethod
    def read_gate(target: Target) -> Gate:
        """Gate and up take turns in the rows."""
        # Not by the configuration, whose numbers Transformers 5.17 does not look at.
        experts: Any = target.layers[0].get_submodule("mlp.experts")
        return Gate(interleaved=True, limit=float(experts.limit), alpha=float(experts.alpha))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The softmax is over the chosen ones."""
        best, chosen = logits.topk(self._chosen, dim=-1)
        return chosen, best.softmax(dim=-1)
