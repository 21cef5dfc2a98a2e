"""Attention of new tokens over slot caches, whose rows have lengths of their own.

A cache is [slots, kv heads, capacity, head_dim]; row r of a batch lives in slot slots[r] and had
starts[r] tokens there before the new ones. A few tokens a row go to `split_attention`, prompts to
PyTorch's own attention, for which what lies in a cache behind a row's end must be finite: it weighs
nothing, but it is read. On CPUs, where lengths can be looked at, `engine.rows` attends row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels.runtime import usable
from domino_spec.engine.kernels.split_attention import launch

MAX_TOKENS = 64
"""More tokens a row are a prompt."""


def attend(
    query: Tensor,  # [rows, n, heads, head_dim]
    keys: Tensor,  # [slots, kv heads, capacity, head_dim], the new tokens' already in it
    values: Tensor,
    slots: Tensor,  # [rows] int64
    starts: Tensor,  # [rows] int64: tokens before the new ones
    *,
    causal: bool,
    window: int | None = None,
    scale: float,
    longest: int | None = None,
) -> Tensor:
    """[rows, n, heads * head_dim].

    A token sees the cache up to itself (`causal`) or up to the last new one; with a window only
    positions nearer than that, on both sides, which is `drafter.masks`' rule. `longest` is a bound
    on starts + n that the caller knows: where PyTorch attends over a batch, it need not look
    further; n itself says that all rows are empty.
    """
    if usable(query) and query.shape[1] <= MAX_TOKENS:
        return launch(query, keys, values, slots, starts, causal=causal, window=window, scale=scale)
    return batch_twin(
        query, keys, values, slots, starts, causal, window, scale, longest or keys.shape[2]
    )


def batch_twin(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
    longest: int,
) -> Tensor:
    """All rows at once and without asking the device for a length. For prompts on GPUs."""
    n = query.shape[1]
    end = min(longest, keys.shape[2])
    own = (keys[:, :, :end].index_select(0, slots), values[:, :, :end].index_select(0, slots))
    if causal and end == n and window is None:
        return mix(query, *own, None, scale, empty=True).flatten(2)
    places = torch.arange(max(n, end), dtype=torch.int32, device=query.device)
    positions, places = starts.int().unsqueeze(1) + places[:n], places[:end]  # [rows, n], [end]
    seen = visible(positions, places, causal, window)
    seen = seen & (places < (starts + n).view(-1, 1, 1))  # [rows, n, end]
    return mix(query, *own, seen.unsqueeze(1), scale, empty=False).flatten(2)


def visible(positions: Tensor, places: Tensor, causal: bool, window: int | None) -> Tensor:
    """Which places of the cache tokens at these positions see, [..., n, places]."""
    distance = positions.unsqueeze(-1) - places  # [..., n, places]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def mix(
    query: Tensor,  # [rows, n, heads, head_dim]
    keys: Tensor,  # [rows, kv heads, positions, head_dim]
    values: Tensor,
    seen: Tensor | None,  # [..., n, positions]
    scale: float,
    *,
    empty: bool,
) -> Tensor:
    """[rows, n, heads, head_dim]; `empty` caches held nothing: plain causal attention."""
    rows, n, heads, head_dim = query.shape
    if empty:
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2)
    # The query heads of a kv head become its queries: each key is read once for all of them.
    folded = query.view(rows, n, keys.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4)
    group = folded.shape[2]
    if seen is not None:
        seen = seen.unsqueeze(-3).expand(*seen.shape[:-2], group, *seen.shape[-2:]).flatten(-3, -2)
    mixed = F.scaled_dot_product_attention(
        folded.flatten(2, 3), keys, values, attn_mask=seen, scale=scale
    )  # [rows, kv heads, group * n, head_dim]
    mixed = mixed.view(rows, keys.shape[1], group, n, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(rows, n, heads, head_dim)
