"""Attention of new tokens over paged caches, whose rows have lengths of their own.

A cache is [pages, kv heads, tokens a page, head_dim]; row r of a batch lies in the pages pages[r]
and had starts[r] tokens there before the new ones. A slot may be one page. A few tokens a row go to
`split_attention`, prompts to PyTorch's own attention, for which what lies in a cache after a row's
end must be finite: it weighs nothing, but it is read. On CPUs, where lengths can be looked at and a
slot is one page, `engine.attention` attends over views of the slots.

A new token's place in the cache is starts + index. Its position is the same, or what `positions`
says (never more than its place); of the other new tokens it sees those up to itself, or those that
`ancestors` says: so a tree of tokens is verified in one forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.drafter.masks import Window
from domino_spec.drafter.tree import ancestor_mask
from domino_spec.engine.kernels.runtime import usable
from domino_spec.engine.kernels.split_attention import launch

if TYPE_CHECKING:
    from domino_spec.engine.attention import Ragged

MAX_TOKENS = 64
"""More tokens a row are a prompt."""
_FOLDED = 1 << 22
"""Numbers of a prompt's mask that are repeated for the query heads of a kv head, at most."""
Masks = dict[tuple[bool, Window | None, int], Tensor]
"""What a forward's tokens see of so many places, 0 or -inf, by causality and window."""


def kernels_take(head_dim: int) -> bool:
    """Whether attention's kernels can be compiled for heads so wide."""
    return head_dim % 16 == 0


def attend(
    query: Tensor,  # [rows, n, heads, head_dim]
    keys: Tensor,  # [pages, kv heads, tokens a page, head_dim], the new tokens' already in it
    values: Tensor,
    pages: Tensor,  # [rows, pages a row]
    starts: Tensor,  # [rows] int64: tokens before the new ones
    *,
    causal: bool,
    window: Window | None = None,
    scale: float,
    longest: int | None = None,
    positions: Tensor | None = None,  # [rows, n] int64
    ancestors: Tensor | None = None,  # [rows, n] int64: bit j says that it sees new token j
    paths: Tensor | None = None,  # [rows, n, n] int64: the same tokens, one a position
    ragged: Ragged | None = None,
    ragged_pages: Tensor | None = None,  # [sequences, pages a row]: those of `ragged`
    sinks: Tensor | None = None,  # [heads]
    masks: Masks | None = None,
) -> Tensor:
    """[rows, n, heads * head_dim].

    A token sees the cache up to itself (`causal`) or up to the last new one; with a window only
    positions nearer than that, on both sides, and its sink tokens, which is `drafter.masks`' rule.
    `longest` is a bound on starts + n that the caller knows: where PyTorch attends over a batch, it
    need not look further; n itself says that all rows are empty. Rows that are `ragged` tokens
    share the reading of their sequence's keys. A sink of `sinks` is a score that a head's softmax
    counts in addition to those of the keys: what it takes is mixed of nothing. `masks` keeps what
    PyTorch's attention reads for the layers that follow.
    """
    if ragged is not None and usable(query) and ragged.count <= MAX_TOKENS:
        assert causal
        assert ragged_pages is not None
        return launch(
            query, keys, values, ragged_pages, ragged.starts, causal=True, window=window,
            scale=scale, offsets=ragged.offsets, count=ragged.count, sinks=sinks,
        )  # fmt: skip
    if usable(query) and query.shape[1] <= MAX_TOKENS:
        return launch(
            query, keys, values, pages, starts,
            causal=causal, window=window, scale=scale, positions=positions, paths=paths,
            sinks=sinks,
        )  # fmt: skip
    return batch_reference(
        query, keys, values, pages, starts, causal, window, scale,
        longest or pages.shape[1] * keys.shape[2], positions,
        None if ancestors is None else ancestor_mask(ancestors), sinks, masks,
    )  # fmt: skip


def batch_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    causal: bool,
    window: Window | None,
    scale: float,
    longest: int,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    masks: Masks | None = None,
) -> Tensor:
    """All rows at once and without asking the device for a length. For prompts on GPUs."""
    n = query.shape[1]
    end = min(longest, pages.shape[1] * keys.shape[2])
    own = (gathered(keys, pages, end), gathered(values, pages, end))
    given = positions is not None or mask is not None
    if causal and end == n and window is None and not given:
        return mix(query, *own, None, scale, empty=True, sinks=sinks).flatten(2)
    masks = {} if masks is None else masks
    if (causal, window, end) not in masks:
        if given:
            seen = visible_to(starts, n, end, causal, window, positions, mask)
        else:
            places = torch.arange(end, device=query.device)
            seen = visible(starts, n, places, causal, window)
        masks[causal, window, end] = added(seen, query.dtype)
    seen = masks[causal, window, end]
    return mix(query, *own, seen, scale, empty=False, sinks=sinks).flatten(2)


def gathered(states: Tensor, pages: Tensor, end: int) -> Tensor:
    """Each row's first places [rows, kv heads, end, head_dim], out of its pages."""
    _, heads, page, head_dim = states.shape
    rows, count = len(pages), -(-end // page)
    if pages.shape[1] == 1:
        return states[:, :, :end].index_select(0, pages[:, 0])
    found = states.transpose(0, 1).index_select(1, pages[:, :count].flatten())
    return found.view(heads, rows, count * page, head_dim).transpose(0, 1)[:, :, :end]


def visible(
    starts: Tensor,  # [rows]
    n: int,
    places: Tensor,
    causal: bool,
    window: Window | None,
) -> Tensor:
    """Which places of the cache so many new tokens see, [rows, n, places]."""
    steps = torch.arange(n, dtype=torch.int32, device=starts.device)
    places, starts = places.int(), starts.int().unsqueeze(1)
    distance = (starts + steps).unsqueeze(2) - places  # [rows, n, places]
    seen = (places < starts + n).unsqueeze(1).expand_as(distance)
    if causal:
        seen = distance >= 0  # which none beyond the last token is
    return seen if window is None else seen & window.sees(distance, places)


def added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for [rows, n, places] to be seen: [rows, 1, n, places]."""
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill_(~seen, -torch.inf).unsqueeze(1)


def visible_to(
    starts: Tensor,  # [rows]
    n: int,
    end: int,
    causal: bool,
    window: Window | None,
    positions: Tensor | None,  # [rows, n]
    mask: Tensor | None,  # [rows, n, n]
) -> Tensor:
    """Which places new tokens see where positions or a mask are given, [rows, n, end]."""
    places = torch.arange(end, device=starts.device)
    index = places - starts.unsqueeze(1)  # [rows, end]: which new token lies there
    new = (index >= 0) & (index < n)
    index = index.clamp(0, n - 1)
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=starts.device)
        mask = (mask.tril() if causal else mask).expand(len(starts), -1, -1)
    among = mask.gather(2, index.unsqueeze(1).expand(-1, n, -1))
    seen = torch.where(new.unsqueeze(1), among, (places < starts.unsqueeze(1)).unsqueeze(1))
    if window is None:
        return seen
    if positions is None:
        positions = starts.unsqueeze(1) + torch.arange(n, device=starts.device)
    there = torch.where(new, positions.gather(1, index), places)  # [rows, end]
    there = there.unsqueeze(1)
    return seen & window.sees(positions.unsqueeze(2) - there, there)


def mix(
    query: Tensor,  # [rows, n, heads, head_dim]
    keys: Tensor,  # [rows, kv heads, positions, head_dim]
    values: Tensor,
    seen: Tensor | None,  # [rows or 1, 1, n, positions], added to the scores
    scale: float,
    *,
    empty: bool,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """[rows, n, heads, head_dim]; `empty` caches held nothing: plain causal attention."""
    rows, n, heads, head_dim = query.shape
    if sinks is not None:
        if empty:
            causal = torch.ones(1, n, n, dtype=torch.bool, device=query.device).tril()
            seen = added(causal, query.dtype)
        mixed = mix(*_with_sinks(query, keys, values, seen, scale, sinks), scale, empty=False)
        return mixed[..., :head_dim]
    if empty:
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
        return mixed.transpose(1, 2)
    # The query heads of a kv head become its queries: each key is read once for all of them. Where
    # their copies of the mask would be large, for fewer: computing takes longer than reading then.
    folded = query.view(rows, n, keys.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4)
    prompt = seen is not None and n > MAX_TOKENS
    most = max(1, _FOLDED // seen.numel()) if seen is not None and prompt else heads
    found = []
    for part in folded.split(most, dim=2):
        some, mask = part.shape[2], seen
        if seen is not None and n > 1:
            mask = seen.unsqueeze(2).expand(-1, -1, some, -1, -1).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(
            part.flatten(2, 3), keys, values, attn_mask=mask, scale=scale
        )  # [rows, kv heads, some * n, head_dim]
        found.append(mixed.view(rows, keys.shape[1], some, n, head_dim))
    whole = found[0] if len(found) == 1 else torch.cat(found, dim=2)
    return whole.permute(0, 3, 1, 2, 4).reshape(rows, n, heads, head_dim)


def _with_sinks(
    query: Tensor,  # [rows, n, heads, head_dim]
    keys: Tensor,  # [rows, kv heads, positions, head_dim]
    values: Tensor,
    seen: Tensor | None,  # [rows or 1, 1, n, positions]
    scale: float,
    sinks: Tensor,  # [heads]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One more key that all see, whose score is a head's sink, and whose value is nothing.

    Its score comes from one more number of each head, which other keys do not have.
    """
    more = 8  # numbers of a head, for alignment's sake
    query = F.pad(query, (0, more))
    query[..., -more] = sinks / scale
    keys, values = F.pad(keys, (0, more, 0, 1)), F.pad(values, (0, more, 0, 1))
    keys[:, :, -1, -more] = 1.0
    if seen is not None:
        seen = F.pad(seen, (0, 1))
    return query, keys, values, seen
