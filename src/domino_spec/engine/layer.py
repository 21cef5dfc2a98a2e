"""One decoder layer over slots: the target's and the drafter's alike."""

from __future__ import annotations

from torch import Tensor

from domino_spec.engine.families import Shape
from domino_spec.engine.host_layer import attend_on_host, run_host_layer, write
from domino_spec.engine.kernels.attention import attend
from domino_spec.engine.kernels.linear import Normed, linear, linear_then_norm
from domino_spec.engine.kernels.rotate import rotate_and_store, store
from domino_spec.engine.kernels.runtime import on_host
from domino_spec.engine.rows import Rows
from domino_spec.engine.weights import LayerWeights


def run_layer(
    states: Normed,  # [rows * count, hidden], by the layer's own norm
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    rows: Rows,
    shape: Shape,
    *,
    causal: bool,
    window: int | None = None,
    norm: Tensor,
    out: Tensor | None = None,
) -> Normed:
    """Attention over cache and new tokens, then the MLP, each added to what came in.

    `norm` is the one behind this layer: the next layer's, or the last one. `out` is where the
    layer's states are wanted, if somebody taps them.
    """
    if on_host(states.rows):
        host = rows.on_host(rotary, states.rows.dtype)
        done = run_host_layer(
            states.rows, weights, cache, host, shape, causal=causal, window=window
        )
        return Normed(done if out is None else out.copy_(done), norm, shape.eps)
    qkv = linear(states, weights.qkv, bias=weights.qkv_bias)
    mixed = run_attention(qkv, weights, cache, rotary, rows, shape, causal=causal, window=window)
    return run_rest(mixed, states.rows, weights, shape, norm=norm, out=out)


def run_attention(
    qkv: Tensor,  # [rows * count, (heads + 2 * kv heads) * head_dim]
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    rows: Rows,
    shape: Shape,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Keys and values stored, then attention over cache and new tokens, [rows * count, width]."""
    if on_host(qkv):
        host = rows.on_host(rotary, qkv.dtype)
        return attend_on_host(qkv, weights, cache, host, shape, causal=causal, window=window)
    keys, values = cache
    query = rotate_and_store(
        qkv.view(rows.slots.shape[0], rows.count, -1), *rotary, keys, values, rows.slots,
        rows.starts, heads=shape.heads, q_norm=weights.q_norm, k_norm=weights.k_norm, eps=shape.eps,
    )  # fmt: skip
    return attend(
        query, keys, values, rows.slots, rows.starts,
        causal=causal, window=window, scale=shape.head_dim**-0.5, longest=rows.longest,
    ).flatten(0, 1)  # fmt: skip


def run_rest(
    mixed: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    shape: Shape,
    *,
    norm: Tensor,
    out: Tensor | None = None,
) -> Normed:
    """What stands behind attention in a layer: the output's product and the MLP."""
    states = linear_then_norm(
        mixed, weights.out, weights.post_norm, shape.eps, bias=weights.out_bias, residual=residual
    )
    gated = linear(states, weights.gate_up, gated=True)
    return linear_then_norm(gated, weights.down, norm, shape.eps, residual=states.rows, out=out)


def store_context(
    kv: Tensor,  # [rows * count, layers * 2 * kv heads * head_dim]: each layer's keys, values
    k_norm: Tensor | None,  # [layers, head_dim]
    cache: tuple[Tensor, Tensor],  # of all layers
    rotary: tuple[Tensor, Tensor],
    rows: Rows,
    shape: Shape,
) -> None:
    """Keys and values alone into all layers' caches: what a drafter's context is made of."""
    keys, values = cache
    layers = len(keys)
    whole = kv.view(rows.slots.shape[0], rows.count, layers, -1)
    if not on_host(kv):
        place = (*rotary, keys, values, rows.slots, rows.starts)
        store(whole, *place, k_norm=k_norm, eps=shape.eps)
        return
    heads = whole.view(*whole.shape[:3], -1, shape.head_dim)
    host = rows.on_host(rotary, kv.dtype)
    for layer in range(layers):
        key, value = heads[:, :, layer].chunk(2, dim=2)
        norm = None if k_norm is None else k_norm[layer]
        write((keys[layer], values[layer]), key, value, host, norm, shape.eps)
