"""What hybrid families share: layers with a gated delta rule between layers of gated attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.engine.attention import AttentionMetadata
from domino_spec.engine.cache import SlotCache
from domino_spec.engine.kernels.linear import Normed, linear
from domino_spec.engine.kernels.packing import Weight
from domino_spec.engine.kernels.pointwise import SILU, rms_norm
from domino_spec.engine.mixture import ExpertWeights, MixtureWeights
from domino_spec.engine.models.base import read_activation
from domino_spec.engine.models.llama import LlamaModel
from domino_spec.engine.models.qwen3_moe import Qwen3MoeModel
from domino_spec.engine.recurrent import (
    HybridCache,
    convolve,
    gated_delta_rule,
    read_delta_shape,
    unit,
)
from domino_spec.engine.weights import (
    AttentionWeights,
    LayerWeights,
    MixerWeights,
    MlpWeights,
    adopt_attention,
    adopt_mlp,
    join_weights,
    own,
    zero_centred,
)
from domino_spec.quantization.modules import QuantizedLinear
from domino_spec.targets import Target
from domino_spec.targets.support import linear_layers


@dataclass(frozen=True, kw_only=True)
class DeltaWeights(MixerWeights):
    """A gated delta rule with a convolution before it and a gated norm after it."""

    inputs: Weight  # [channels + value width + 2 * value heads, hidden], in the family's order
    kernel: Tensor  # [channels, 1, tokens]: queries, keys, values
    rate: Tensor  # [value heads] float32, negative: decays are its multiples
    step_bias: Tensor  # [value heads]
    gated_norm: Tensor  # [value_dim]


@dataclass(frozen=True, kw_only=True)
class DeltaLayerWeights(DeltaWeights, MlpWeights):
    """Such a layer with an MLP."""


@dataclass(frozen=True, kw_only=True)
class DeltaMixtureWeights(DeltaWeights, ExpertWeights):
    """Such a layer with experts."""


class HybridModel(LlamaModel):
    """Qwen's hybrids. A family says how its input projections lie (`split_inputs`)."""

    delta_class: ClassVar[type[nn.Module]]
    """The layers' linear attention."""
    delta_inputs: ClassVar[tuple[str, ...]]
    """Its input projections, in the order in which they are joined."""
    layers: Sequence[LayerWeights | DeltaLayerWeights]  # type: ignore[assignment]

    def __init__(self, target: Target, *, slots: int, capacity: int, pack: bool = False) -> None:
        self.delta = read_delta_shape(target.config)
        super().__init__(target, slots=slots, capacity=capacity, pack=pack)

    # What a family says -------------------------------------------------------------------------

    @abstractmethod
    def split_inputs(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the convolution reads [..., channels], the gate [..., value heads, value_dim], and
        of each value head, [..., value heads], the logit of beta and the decay's step."""

    # What all do alike --------------------------------------------------------------------------

    @classmethod
    def unsupported_reason(cls, target: Target) -> str | None:
        """Beyond what all refuse: quantised weights, and linear attention of another form."""
        if (activation := read_activation(target.config)) != SILU:
            return f"its activation is {activation}, not {SILU}"
        for index in linear_layers(target.config):
            module = target.layers[index].linear_attn
            if type(module) is not cls.delta_class or hasattr(module, "_hf_hook"):
                return f"its layer {index} has a {type(module).__name__} (adapted or off-loaded)"
        if any(isinstance(module, QuantizedLinear) for module in target.model.modules()):
            return "its weights are quantised, which no hybrid is tested with"
        return super().unsupported_reason(target)

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:
        """Linear attention has its own."""
        every = super().projections(layer)
        if not hasattr(layer, "linear_attn"):
            return every
        mlp = (name for name in every if name.startswith("mlp."))
        return (*(f"linear_attn.{name}" for name in (*cls.delta_inputs, "out_proj")), *mlp)

    @staticmethod
    def adopt_norm(norm: Any) -> Tensor:
        """One is added to its weights."""
        return zero_centred(norm.weight)

    @classmethod
    def adopt_layer(cls, layer: Any) -> Any:
        """All of its weights, joined where they are read together."""
        mixer = cls.adopt_mixer(layer)
        kind = DeltaLayerWeights if isinstance(mixer, DeltaWeights) else LayerWeights
        return kind(**vars(mixer), **adopt_mlp(layer.mlp))

    @classmethod
    def adopt_mixer(cls, layer: Any) -> DeltaWeights | AttentionWeights:
        """All but what computes each token alone."""
        norms = {
            "input_norm": cls.adopt_norm(layer.input_layernorm),
            "post_norm": cls.adopt_norm(layer.post_attention_layernorm),
        }
        if not hasattr(layer, "linear_attn"):
            attention = layer.self_attn
            norms["q_norm"] = cls.adopt_norm(attention.q_norm)
            norms["k_norm"] = cls.adopt_norm(attention.k_norm)
            return AttentionWeights(**(vars(adopt_attention(layer)) | norms))
        delta = layer.linear_attn
        return DeltaWeights(
            **norms,
            inputs=join_weights([getattr(delta, name).weight for name in cls.delta_inputs]),
            kernel=own(delta.conv1d.weight),
            rate=-delta.A_log.detach().float().exp(),
            step_bias=own(delta.dt_bias),
            gated_norm=own(delta.norm.weight),
            out=own(delta.out_proj.weight),
        )

    def make_cache(self, **sizes: Any) -> SlotCache:
        """Keys and values for some layers, states for the others."""
        return HybridCache(self.delta, linear=linear_layers(self._config), **sizes)

    def attend(self, index: int, states: Normed | Tensor, metadata: AttentionMetadata) -> Tensor:
        """What mixes a layer's tokens, up to its output projection."""
        weights, shape = self.layers[index], self.shape
        if isinstance(weights, DeltaWeights):
            return self._sum_up(index, weights, states, metadata)
        joined = linear(states, weights.qkv, bias=weights.qkv_bias)
        # A head's query and its gate lie together.
        both, rest = joined.tensor_split([2 * shape.heads * shape.head_dim], dim=1)
        query, gate = both.view(len(both), -1, 2, shape.head_dim).unbind(2)
        mixed = self.attend_with(index, torch.cat((query.flatten(1), rest), dim=1), metadata)
        return mixed * gate.flatten(1).sigmoid()

    def _sum_up(
        self,
        index: int,
        weights: DeltaWeights,
        states: Normed | Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The gated delta rule after each slot's tokens, [tokens, value width]."""
        assert isinstance(self.cache, HybridCache)
        past, delta, ragged = self.cache.recurrent(index), self.delta, metadata.ragged
        joined = linear(states, weights.inputs)
        if ragged is None:
            slots, starts = metadata.slots, metadata.starts
            joined = joined.view(len(slots), metadata.count, -1)
        else:  # places after a sequence's last token are computed and never committed
            slots, starts = ragged.slots, ragged.starts
            blocks = joined.new_zeros(len(slots), ragged.count, joined.shape[1])
            blocks[ragged.rows, ragged.steps] = joined
            joined = blocks
        inputs, gate, share, step = self.split_inputs(joined)
        state, earlier = past.read(slots, starts)
        inputs = torch.cat((earlier, inputs), dim=1)
        mixed = F.silu(convolve(inputs, weights.kernel))
        both, value = mixed.tensor_split([2 * delta.key_width], dim=-1)
        query, key = unit(by_head(both, 2 * delta.key_heads)).chunk(2, dim=-2)
        value = by_head(value, delta.value_heads).float()
        beta = share.sigmoid().float()
        decay = weights.rate * F.softplus(step.float() + weights.step_bias)
        if (kept := metadata.kept) is not None:  # padding neither decays nor teaches
            padding = torch.arange(decay.shape[1], device=decay.device) >= kept.unsqueeze(1)
            beta = beta.masked_fill(padding.unsqueeze(2), 0.0)
            decay = decay.masked_fill(padding.unsqueeze(2), 0.0)
        read, updates, state = gated_delta_rule(query, key, value, decay, beta, state)
        if kept is None:
            past.record(slots, key, updates, decay, inputs)
        else:
            past.store(slots, state, inputs, kept)
        if ragged is not None:
            read, gate = (each[ragged.rows, ragged.steps] for each in (read, gate))
        rows = read.to(gate.dtype).reshape(-1, delta.value_dim)
        rows = rms_norm(rows, weights.gated_norm, self.shape.eps)
        return (
            (rows * F.silu(gate.reshape(rows.shape).float()))
            .to(rows.dtype)
            .view(-1, delta.value_width)
        )


class HybridMixtureModel(HybridModel, Qwen3MoeModel):
    """Hybrids with experts, one of which every token takes."""

    layers: Sequence[Any]

    @classmethod
    def projections(cls, layer: Any) -> tuple[str, ...]:
        """The shared expert has linear layers."""
        every = super().projections(layer)
        if cls.router_of(layer) is None:
            return every
        shared = ("gate_proj", "up_proj", "down_proj")
        names = (f"mlp.shared_expert.{name}" for name in shared)
        return (*every, *names, "mlp.shared_expert_gate")

    @classmethod
    def adopt_layer(cls, layer: Any) -> Any:
        """All of its weights; those of experts lie together already."""
        if cls.router_of(layer) is None:
            return super().adopt_layer(layer)
        mixer = cls.adopt_mixer(layer)
        kind = DeltaMixtureWeights if isinstance(mixer, DeltaWeights) else MixtureWeights
        return kind(**vars(mixer), **cls.adopt_experts(layer))

    @staticmethod
    def adopt_experts(layer: Any) -> dict[str, Any]:
        """The shared one too."""
        shared = adopt_mlp(layer.mlp.shared_expert)
        return Qwen3MoeModel.adopt_experts(layer) | {
            "shared_gate_up": shared["gate_up"],
            "shared_down": shared["down"],
            "shared_gate": own(layer.mlp.shared_expert_gate.weight),
        }


def by_head(states: Tensor, heads: int) -> Tensor:
    """[..., heads * width] -> [..., heads, width]."""
    return states.reshape(*states.shape[:-1], heads, -1)


def split_joined(model: HybridModel, joined: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`split_inputs` of projections that lie one after the other, as in Qwen3.5."""
    delta = model.delta
    heads = delta.value_heads
    inputs, gate, share, step = torch.split(
        joined, [delta.channels, delta.value_width, heads, heads], dim=-1
    )
    return inputs, by_head(gate, heads), share, step
