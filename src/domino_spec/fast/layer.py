"""One decoder layer over slots: the target's and the drafter's alike."""

from __future__ import annotations

from torch import Tensor

from domino_spec.fast.families import Shape
from domino_spec.fast.host_layer import run_host_layer, write
from domino_spec.fast.kernels.attention import attend
from domino_spec.fast.kernels.linear import linear
from domino_spec.fast.kernels.rotate import rotate_and_store, store
from domino_spec.fast.kernels.runtime import on_host
from domino_spec.fast.rows import Rows
from domino_spec.fast.weights import LayerWeights


def run_layer(
    states: Tensor,  # [rows * count, hidden]
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    rows: Rows,
    shape: Shape,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention over cache and new tokens, then the MLP, each added to what came in."""
    if on_host(states):
        host = rows.on_host(rotary, states.dtype)
        return run_host_layer(states, weights, cache, host, shape, causal=causal, window=window)
    batch = rows.slots.shape[0]
    qkv = linear(
        states, weights.qkv, norm=weights.input_norm, eps=shape.eps, bias=weights.qkv_bias
    ).view(batch, rows.count, -1)
    keys, values = cache
    query = rotate_and_store(
        qkv, *rotary, keys, values, rows.slots, rows.starts,
        heads=shape.heads, q_norm=weights.q_norm, k_norm=weights.k_norm, eps=shape.eps,
    )  # fmt: skip
    mixed = attend(
        query, keys, values, rows.slots, rows.starts,
        causal=causal, window=window, scale=shape.head_dim**-0.5, longest=rows.longest,
    )  # fmt: skip
    states = linear(mixed.flatten(0, 1), weights.out, bias=weights.out_bias, residual=states)
    gated = linear(states, weights.gate_up, norm=weights.post_norm, eps=shape.eps, gated=True)
    return linear(gated, weights.down, residual=states)


def store_context(
    kv: Tensor,  # [rows * count, 2 * kv heads * head_dim]: keys, values
    k_norm: Tensor | None,
    cache: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    rows: Rows,
    shape: Shape,
) -> None:
    """Keys and values alone into the cache: what a drafter's context is made of."""
    whole = kv.view(rows.slots.shape[0], rows.count, -1)
    if on_host(kv):
        heads = whole.view(*whole.shape[:2], -1, shape.head_dim)
        key, value = heads.chunk(2, dim=2)
        write(cache, key, value, rows.on_host(rotary, kv.dtype), k_norm, shape.eps)
    else:
        place = (*rotary, *cache, rows.slots, rows.starts)
        store(whole, *place, k_norm=k_norm, eps=shape.eps)
