"""Llama, and the pre-norm layer that its relatives and our drafters share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from torch import Tensor
from transformers import LlamaForCausalLM

from domino_spec.drafter.masks import Window
from domino_spec.engine.attention import AttentionMetadata, run_attention
from domino_spec.engine.cache import LayerCache
from domino_spec.engine.kernels.linear import Normed, embedded, linear, linear_then_norm
from domino_spec.engine.kernels.pointwise import SILU
from domino_spec.engine.models.base import InferenceModel, Shape
from domino_spec.engine.weights import LayerWeights, MlpWeights, adopt_layer
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.stack import Stack


def run_layer(
    states: Normed,  # [tokens, hidden], by the layer's own norm
    weights: LayerWeights,
    cache: LayerCache,
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
    *,
    causal: bool,
    window: Window | None = None,
    norm: Tensor,
    out: Tensor | None = None,
) -> Normed:
    """Attention over cache and new tokens, then the MLP, each added to what came in.

    `norm` is the one after this layer: the next layer's, or the last one.
    """
    qkv = linear(states, weights.qkv, bias=weights.qkv_bias)
    mixed = run_attention(
        qkv, cache, rotary, metadata, shape,
        q_norm=weights.q_norm, k_norm=weights.k_norm, causal=causal, window=window,
    )  # fmt: skip
    return run_rest(mixed, states.rows, weights, shape, norm=norm, out=out)


def stack_of(layers: Sequence[LayerWeights], shape: Shape) -> Stack | None:
    """Such layers as one call computes them; None where that cannot be, as for plain weights."""
    compiled = kernel() if shape.batch_invariant else None
    if compiled is None:
        return None
    return Stack(compiled, cast("Any", layers), eps=shape.eps, scale=shape.scale)


def run_stack(
    stack: Stack,
    states: Normed,  # [tokens, hidden], whose rows are written over
    cache: tuple[Tensor, Tensor],  # of all layers
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
    *,
    causal: Sequence[bool],  # of each layer
    outputs: dict[int, Tensor],
) -> Tensor:
    """`run_layer` of every layer: [tokens, hidden] after the last."""
    rows = states.rows.contiguous()
    tokens = metadata.per_token(cache[0].shape[3], len(rotary[0]))
    seen = [tokens.seen(*each) for each in zip(causal, shape.windows, strict=True)]
    stack.run(rows, cache, rotary, tokens.places, seen, outputs)
    return rows


def run_rest(
    mixed: Tensor,  # [tokens, heads * head_dim]
    residual: Tensor,  # [tokens, hidden]
    weights: MlpWeights,
    shape: Shape,
    *,
    norm: Tensor,
    out: Tensor | None = None,
) -> Normed:
    """What follows attention in a layer: the output projection and the MLP."""
    states = linear_then_norm(
        mixed, weights.out, weights.post_norm, shape.eps, bias=weights.out_bias, residual=residual
    )
    gated = linear(states, weights.gate_up, gated=True, activation=shape.activation)
    return linear_then_norm(gated, weights.down, norm, shape.eps, residual=states.rows, out=out)


class LlamaModel(InferenceModel):
    """Pre-norm layers with grouped-query attention and SwiGLU."""

    reference_class = LlamaForCausalLM
    layers: Sequence[LayerWeights]

    @staticmethod
    def adopt_layer(layer: Any) -> LayerWeights:
        """All of its weights, joined where they are read together."""
        return adopt_layer(layer)

    def embed(self, tokens: Tensor) -> Normed:
        """Embeddings, normed for the first layer."""
        return embedded(tokens, self.embedding, self.norm_after(-1), self.shape.eps)

    def run_layers(
        self, states: Normed, metadata: AttentionMetadata, outputs: dict[int, Tensor]
    ) -> Normed | Tensor:
        """In one call where a compiled kernel can: of quantised weights."""
        if (stack := self._stack) is None:
            return super().run_layers(states, metadata, outputs)
        inner = {layer: rows for layer, rows in outputs.items() if layer < len(self.layers)}
        rows = run_stack(
            stack, states, self.cache.layers[:2], self.rotary[0], metadata, self.shape,
            causal=[True] * len(self.layers), outputs=inner,
        )  # fmt: skip
        return Normed(rows, self.norm, self.shape.eps)

    @cached_property
    def _stack(self) -> Stack | None:
        own, llama = type(self), LlamaModel
        composed = any(
            getattr(own, name) is not getattr(llama, name)
            for name in ("run_layer", "attend", "run_rest")
        )
        alike = all(table is self.rotary[0] for table in self.rotary)
        plain = alike and self.shape.activation == SILU
        return stack_of(self.layers, self.shape) if plain and not composed else None

    def run_layer(
        self, index: int, states: Normed, metadata: AttentionMetadata, out: Tensor | None
    ) -> Normed:
        """What mixes tokens, then what computes each alone."""
        return self.run_rest(index, self.attend(index, states, metadata), states.rows, out)

    def run_rest(self, index: int, mixed: Tensor, residual: Tensor, out: Tensor | None) -> Normed:
        """The output projection and the MLP; products take norms and residuals along."""
        norm = self.norm_after(index)
        return run_rest(mixed, residual, self.layers[index], self.shape, norm=norm, out=out)

    def attend(self, index: int, states: Normed | Tensor, metadata: AttentionMetadata) -> Tensor:
        """A layer's attention up to its output projection, [tokens, heads * head_dim]."""
        weights = self.layers[index]
        qkv = linear(states, weights.qkv, bias=weights.qkv_bias)
        return self.attend_with(index, qkv, metadata)

    def attend_with(self, index: int, qkv: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The same of queries, keys and values [tokens, (heads + 2 * kv heads) * head_dim]."""
        weights, shape = self.layers[index], self.shape
        return run_attention(
            qkv, self.cache.layer(index), self.rotary[index], metadata, shape,
            q_norm=weights.q_norm, k_norm=weights.k_norm, sinks=weights.sinks,
            causal=True, window=shape.windows[index],
        )  # fmt: skip

    def norm_after(self, index: int) -> Tensor:
        """The norm by which a layer's output is read next, [hidden]."""
        following = index + 1
        return self.layers[following].input_norm if following < len(self.layers) else self.norm
