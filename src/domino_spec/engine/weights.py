"""Weights of a layer as an inference model wants them: what is read together lies together.

Query, key and value projections become one matrix, gate and up another. The model they came from
keeps working: its parameters become views of the joined ones, so there is no second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from domino_spec.engine.kernels.packing import Parts, Weight, packed, page_out
from domino_spec.quantization import TILE, QuantizedWeight, ScaledWeight


class LayerTensors:
    """A layer's weights: a frozen dataclass of matrices, norms and biases."""

    @property
    def nbytes(self) -> int:
        """What one forward reads."""
        return nbytes(value for value in vars(self).values() if value is not None)

    @property
    def kinds(self) -> list[str]:
        """Of its weights in few bits."""
        few = (QuantizedWeight, ScaledWeight)
        return sorted({value.kind for value in vars(self).values() if isinstance(value, few)})

    def packed(self) -> Self:
        """With matrices as a CPU likes them, where it can pack them."""
        matrices = {
            name: packed(value)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.dim() == 2 and not name.endswith("_bias")
        }
        return replace(self, **matrices)  # type: ignore[type-var]

    def quantized(self) -> Self:
        """With matrices in blocks of 8 bits."""
        matrices = {
            name: QuantizedWeight.quantize(value, "Q8_0")
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.dim() == 2 and not name.endswith("_bias")
        }
        return replace(self, **matrices)  # type: ignore[type-var]


T = TypeVar("T", bound=LayerTensors)


@dataclass(frozen=True, kw_only=True)
class MixerWeights(LayerTensors):
    """What a pre-norm decoder layer has around whatever mixes its tokens."""

    input_norm: Tensor  # [hidden]
    out: Weight  # [hidden, heads * head_dim]
    out_bias: Tensor | None = None
    post_norm: Tensor  # [hidden]


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(MixerWeights):
    """Norms and grouped-query attention of such a layer."""

    qkv: Weight  # [(heads + 2 * kv heads) * head_dim, hidden]: query, key, value
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    sinks: Tensor | None = None  # [heads]: what a softmax counts in addition, and nothing is mixed


@dataclass(frozen=True, kw_only=True)
class MlpWeights(MixerWeights):
    """A layer with SwiGLU, or an MLP with another gate."""

    gate_up: Weight  # [2 * intermediate, hidden]: gate, up
    down: Weight  # [hidden, intermediate]


@dataclass(frozen=True, kw_only=True)
class LayerWeights(AttentionWeights, MlpWeights):
    """A layer with attention and an MLP."""


def adopt_layers(layers: Iterable[Any]) -> tuple[list[LayerWeights], Tensor]:
    """Layers whose query, key and value projections lie in one tensor [layers, rows, hidden]."""
    layers = list(layers)
    attentions = [layer.self_attn for layer in layers]
    whole = join([p.weight for a in attentions for p in (a.q_proj, a.k_proj, a.v_proj)])
    return [adopt_layer(layer) for layer in layers], whole.view(len(layers), -1, whole.shape[1])


def adopt_layer(layer: Any) -> LayerWeights:
    """Take over a Llama-like layer of Transformers, or one of our drafter's."""
    return LayerWeights(**vars(adopt_attention(layer)), **adopt_mlp(layer.mlp))


def adopt_mlp(mlp: Any) -> dict[str, Any]:
    """Take over an MLP, as `MlpWeights` has it."""
    return {
        "gate_up": join_weights([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": own(mlp.down_proj.weight),
    }


def adopt_attention(layer: Any) -> AttentionWeights:
    """Take over all of it but the MLP."""
    attention = layer.self_attn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return AttentionWeights(
        input_norm=own(layer.input_layernorm.weight),
        qkv=join_weights([p.weight for p in projections]),
        qkv_bias=joined_bias([p.bias for p in projections]),
        q_norm=None if norms[0] is None else own(norms[0].weight),
        k_norm=None if norms[1] is None else own(norms[1].weight),
        out=own(attention.o_proj.weight),
        out_bias=None if attention.o_proj.bias is None else own(attention.o_proj.bias),
        post_norm=own(layer.post_attention_layernorm.weight),
        sinks=own(attention.sinks) if hasattr(attention, "sinks") else None,
    )


def adopt_packed(layer: Any, adopt: Callable[[Any], T]) -> T:
    """A layer's packed weights. Its module keeps its own parameters: joined ones would be a copy
    that nothing reads."""
    own = [(parameter, parameter.data) for parameter in layer.parameters()]
    weights = adopt(layer).packed()
    for parameter, data in own:
        parameter.data = data
        page_out(data)
    return weights


def join_weights(weights: Sequence[Tensor | QuantizedWeight | ScaledWeight]) -> Weight:
    """`join` of weights of any form; of several forms they are read one after the other."""
    if all(isinstance(weight, Tensor) for weight in weights):
        return join(cast("Sequence[Tensor]", weights))
    scaled = [weight for weight in weights if isinstance(weight, ScaledWeight)]
    if len(scaled) == len(weights) and len({weight.form for weight in scaled}) == 1:
        return ScaledWeight.cat(scaled)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    alike = len(quantized) == len(weights) and len({weight.kind for weight in quantized}) == 1
    if not alike or any(weight.shape[0] % TILE for weight in quantized[:-1]):
        return Parts([w.detach() if isinstance(w, Tensor) else w for w in weights])
    tiles, rows = [weight.tiles for weight in quantized], sum(w.shape[0] for w in quantized)
    if (whole := _already_joined(tiles)) is not None:
        return QuantizedWeight(whole, quantized[0].kind, rows)
    joined, start = torch.cat(tiles), 0
    for weight in quantized:
        end = start + len(weight.tiles)
        weight.tiles, start = joined[start:end], end
    return QuantizedWeight(joined, quantized[0].kind, rows)


@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all rows; the parameters become views of it."""
    if (whole := _already_joined(parameters)) is not None:
        return whole
    joined = torch.cat([p.detach() for p in parameters])
    start = 0
    for parameter in parameters:
        rows = joined[start : start + len(parameter)]
        parameter.data = rows  # the old storage goes once nothing else holds it
        start += len(rows)
    return joined


def _already_joined(parameters: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are views, one after the other: an earlier engine's work."""
    first, rows = parameters[0].detach(), 0
    for parameter in parameters:
        place = first.storage_offset() + rows * first.stride(0)
        together = (
            parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and parameter.storage_offset() == place
            and parameter.stride() == first.stride()
            and parameter.is_contiguous()
        )
        if not together:
            return None
        rows += len(parameter)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def joined_bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    """The biases of joined projections, where they have any."""
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    assert len(present) == len(biases), "checked before: all projections have a bias or none"
    return join(present)


def zero_centred(weight: Tensor) -> Tensor:
    """A norm's weights that one is added to, in float32: half precision would round most away."""
    return 1.0 + weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


W = TypeVar("W", Tensor, QuantizedWeight, ScaledWeight)


def own(weight: W) -> W:
    """A module's weight as an inference model holds it."""
    return weight.detach() if isinstance(weight, Tensor) else weight


def nbytes(weights: Iterable[Weight]) -> int:
    """Bytes of all of them."""
    return sum(weight.nbytes for weight in weights)
