"""A decoder layer on a CPU: `layer.run_layer` with as few operations as PyTorch allows.

Of a small model's step on a CPU, half is the cost of starting operations. So what all layers share
is computed once (`rows.HostRows`), caches are written and read through views, and norms are single
operations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.families import Shape
from domino_spec.engine.kernels.packing import product
from domino_spec.engine.rows import HostRows
from domino_spec.engine.weights import LayerWeights


def run_host_layer(
    states: Tensor,  # [rows * count, hidden]
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    rows: HostRows,
    shape: Shape,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attention over cache and new tokens, then the MLP, each added to what came in."""
    normed = F.rms_norm(states, (shape.hidden,), weights.input_norm, shape.eps)
    qkv = product(normed, weights.qkv, weights.qkv_bias)
    mixed = attend_on_host(qkv, weights, cache, rows, shape, causal=causal, window=window)
    states = states + product(mixed, weights.out, weights.out_bias)
    normed = F.rms_norm(states, (shape.hidden,), weights.post_norm, shape.eps)
    gate, up = product(normed, weights.gate_up, None).chunk(2, dim=-1)
    return states + product(F.silu(gate).mul_(up), weights.down, None)


def attend_on_host(
    qkv: Tensor,  # [rows * count, (heads + 2 * kv heads) * head_dim]
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    rows: HostRows,
    shape: Shape,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Keys and values stored, then attention over cache and new tokens."""
    heads = qkv.view(len(rows.spans), rows.count, -1, shape.head_dim)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    query, key, value = torch.split(heads, sizes, dim=2)
    if weights.q_norm is not None:
        query = F.rms_norm(query, (shape.head_dim,), weights.q_norm, shape.eps)
    query = rows.rotated(query)
    write(cache, key, value, rows, weights.k_norm, shape.eps)
    return rows.attend(
        query, *cache, causal=causal, window=window, scale=shape.head_dim**-0.5
    ).flatten(0, 1)


def write(
    cache: tuple[Tensor, Tensor],
    key: Tensor,  # [rows, count, kv heads, head_dim], not yet normed or rotated
    value: Tensor,
    rows: HostRows,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Keys and values into the caches, as far as these reach."""
    if k_norm is not None:
        key = F.rms_norm(key, (key.shape[-1],), k_norm, eps)
    for states, new in ((cache[0], rows.rotated(key)), (cache[1], value)):
        capacity = states.shape[2]
        for row, (slot, start) in enumerate(rows.spans):
            room = max(min(rows.count, capacity - start), 0)
            states[slot, :, start : start + room] = new[row, :room].transpose(0, 1)
