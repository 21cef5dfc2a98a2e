"""What families with experts share: a layer whose MLP is a sum of a few of many."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from domino_spec.engine.kernels.experts import Experts, Gate, route, run_experts
from domino_spec.engine.kernels.linear import Normed, linear, normed
from domino_spec.engine.kernels.packing import Weight
from domino_spec.engine.kernels.pointwise import rms_norm
from domino_spec.engine.kernels.runtime import SWITCH, usable
from domino_spec.engine.models.llama import LlamaModel
from domino_spec.engine.weights import (
    AttentionWeights,
    LayerWeights,
    MixerWeights,
    adopt_attention,
    adopt_layer,
)
from domino_spec.targets import Target


@dataclass(frozen=True, kw_only=True)
class ExpertWeights(MixerWeights):
    """A layer with experts, perhaps one among them that every token takes."""

    router: Weight  # [experts, hidden]
    router_bias: Tensor | None = None  # [experts]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden], of any strides
    gate_up_bias: Tensor | None = None  # [experts, 2 * intermediate]
    down: Tensor  # [experts, hidden, intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]
    shared_gate_up: Weight | None = None  # [2 * intermediate, hidden]
    shared_down: Weight | None = None  # [hidden, intermediate]
    shared_gate: Weight | None = None  # [1, hidden]: of how much it is added

    @property
    def experts(self) -> Experts:
        """For `run_experts`."""
        return Experts(
            gate_up=self.gate_up,
            gate_up_bias=self.gate_up_bias,
            down=self.down,
            down_bias=self.down_bias,
        )


@dataclass(frozen=True, kw_only=True)
class MixtureWeights(AttentionWeights, ExpertWeights):
    """A layer with attention and experts."""


class MixtureModel(LlamaModel):
    """Llama's layers with experts; some layers may have a plain MLP."""

    router_class: ClassVar[type[nn.Module]]
    experts_class: ClassVar[type[nn.Module]]
    layers: Sequence[LayerWeights | MixtureWeights]  # type: ignore[assignment]

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)
        self._chosen = int(target.config.num_experts_per_tok)
        self._gate = self.read_gate(target)

    # What a family says -------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def router_of(layer: Any) -> Any:
        """A layer's router, None where its MLP is plain."""

    @staticmethod
    @abstractmethod
    def adopt_experts(layer: Any) -> dict[str, Any]:
        """A layer's router and experts, as `ExpertWeights` has them."""

    @staticmethod
    @abstractmethod
    def read_gate(target: Target) -> Gate:
        """How experts are gated."""

    @abstractmethod
    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their weights, each [tokens, k], of a router's logits [tokens, experts]."""

    # What all do alike --------------------------------------------------------------------------

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:
        """Experts have no linear layers."""
        every = super().projections(layer)
        if cls.router_of(layer) is None:
            return every
        return tuple(name for name in every if not name.startswith("mlp."))

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """Beyond what all refuse: experts that are not Transformers' own, GPUs without kernels."""
        for layer in target.layers:
            if (router := cls.router_of(layer)) is None:
                continue
            experts = layer.get_submodule("mlp.experts")
            for module, kind in ((router, cls.router_class), (experts, cls.experts_class)):
                if type(module) is not kind or hasattr(module, "_hf_hook"):
                    found = type(module).__name__
                    return f"its experts have a {found} (quantised, adapted or off-loaded)"
        if target.device.type == "cuda" and not usable(next(target.model.parameters())):
            return f"its experts need Triton's kernels on CUDA (and {SWITCH} not to be off)"
        return super().unsupported_reason(target)

    @classmethod
    def adopt_layer(cls, layer: Any) -> Any:
        """All of its weights; those of experts lie together already."""
        if cls.router_of(layer) is None:
            return adopt_layer(layer)
        return MixtureWeights(**vars(adopt_attention(layer)), **cls.adopt_experts(layer))

    @property
    def nbytes(self) -> int:
        """A token reads the experts that are chosen for it alone."""
        total = super().nbytes
        for weights in self.layers:
            if isinstance(weights, ExpertWeights):
                experts = weights.gate_up.nbytes + weights.down.nbytes
                total -= experts - experts * self._chosen // len(weights.down)
        return total

    def run_rest(self, index: int, mixed: Tensor, residual: Tensor, out: Tensor | None) -> Normed:
        """Router and experts read the same normed states."""
        weights, shape = self.layers[index], self.shape
        if not isinstance(weights, ExpertWeights):
            return super().run_rest(index, mixed, residual, out)
        rows = linear(mixed, weights.out, bias=weights.out_bias, residual=residual)
        x = rms_norm(rows, weights.post_norm, shape.eps)
        chosen, factors = self.choose(linear(x, weights.router, bias=weights.router_bias))
        routing = route(chosen, factors, len(weights.down))
        added = run_experts(x, routing, weights.experts, self._gate)
        if weights.shared_gate_up is not None:
            assert weights.shared_down is not None
            assert weights.shared_gate is not None
            gated = linear(x, weights.shared_gate_up, gated=True, activation=shape.activation)
            share = torch.sigmoid(linear(x, weights.shared_gate))
            added = added + share * linear(gated, weights.shared_down)
        return normed(torch.add(rows, added, out=out), self.norm_after(index), shape.eps)
