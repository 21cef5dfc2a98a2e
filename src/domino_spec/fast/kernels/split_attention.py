"""The kernels of `attention`: one kv head's queries over stretches of the context, then joined.

A program takes some queries of one kv head of one row and one stretch of the row's positions.
How many programs there are follows from shapes alone, so that a captured graph serves any length;
how long their stretches are follows from the row's length, so that short contexts use all of them
too. With few queries the program that finishes last joins the parts; with many, the parts are too
much for one program to read, and a second launch joins them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from domino_spec.fast.kernels.overlap import overlap
from domino_spec.fast.kernels.runtime import triton_available

PROGRAMS = 132
"""How many programs to aim at: the multiprocessors of an H200."""
MAX_SPLITS = 32
TILE = 64
"""Queries (tokens times query heads of a kv head) that a program takes."""
BLOCK = 128
"""Positions a program reads at once."""
JOINED_BY_LAST = 16384
"""Up to so many numbers in the parts of a kv head the last program joins them."""
JOINED_AT_ONCE = 8192
"""How many numbers of the parts a program of the second launch takes."""
_COUNTERS = 4096


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    block: int = BLOCK,
    tile: int = TILE,
    splits: int | None = None,
    joined_by_last: bool | None = None,
) -> Tensor:
    """The kernels; the last four arguments are what shapes decide in production."""
    rows, n, heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    assert query.is_contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride()[2:] == (head_dim, 1)
    queries = triton.next_power_of_2(n * group)
    live = min(queries, tile)
    tiles = triton.cdiv(n * group, live)
    if splits is None:
        splits = min(PROGRAMS // (rows * kv_heads * tiles), -(-capacity // block), MAX_SPLITS)
        splits = 1 << max(splits, 1).bit_length() - 1
    if joined_by_last is None:
        parts_fit = live * splits * head_dim <= JOINED_BY_LAST
        joined_by_last = parts_fit and rows * kv_heads * tiles <= _COUNTERS

    # Each split's mix before division, its highest score and its sum of weights.
    wide = torch.float32
    parts = query.new_empty(rows, kv_heads, splits, n * group, head_dim, dtype=wide)
    highest = query.new_empty(rows, kv_heads, splits, n * group, dtype=wide)
    totals = torch.empty_like(highest)
    mixed = query.new_empty(rows, n, heads * head_dim)
    shapes = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK": block,
        "SPLITS": splits,
        "WINDOWED": window is not None,
        **overlap(query),
    }
    _attend[(splits, kv_heads * tiles, rows)](
        query,
        keys,
        values,
        slots,
        starts,
        mixed,
        parts,
        highest,
        totals,
        _counters(query.device),
        n,
        capacity,
        window or 0,
        keys.stride(0),
        keys.stride(1),
        scale,
        CAUSAL=causal,
        TILES=tiles,
        QUERIES=max(live, 16),
        LIVE=live,
        JOINED=joined_by_last,
        num_warps=8 if live > 64 else 4,
        num_stages=3,
        **shapes,
    )
    if splits > 1 and not joined_by_last:
        joined = max(1, min(queries, JOINED_AT_ONCE // (splits * head_dim)))
        _join[(triton.cdiv(n * group, joined), kv_heads, rows)](
            starts,
            mixed,
            parts,
            highest,
            totals,
            n,
            capacity,
            window or 0,
            TILE=joined,
            num_warps=4,
            **shapes,
        )
    return mixed


@cache
def _counters(device: torch.device) -> Tensor:
    """How many programs of a head have finished; the last sets it back to 0.

    Made once a device, by the first call, which must not be inside a graph's capture.
    """
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.fast.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _stretches(
        start,
        n,
        capacity,
        window,
        BLOCK: tl.constexpr,
        SPLITS: tl.constexpr,
        WINDOWED: tl.constexpr,
    ):
        """(end of what is seen, its first block, blocks a split, splits in use)."""
        end = tl.minimum(start + n, capacity)
        behind = tl.cdiv(end, BLOCK)
        first = start * 0
        if WINDOWED:
            first = tl.maximum(start - window + 1, 0) // BLOCK
            first = tl.minimum(first, behind - 1)
        each = tl.cdiv(behind - first, SPLITS)
        return end, first, each, tl.cdiv(behind - first, each)

    @triton.jit
    def _places(row, head, query, n, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
        """Which of [rows, n, heads] a head's queries are."""
        return ((row * n + query // GROUP) * KV_HEADS + head) * GROUP + query % GROUP

    @triton.jit
    def _joined(
        parts,
        highest,
        totals,
        first,  # the first query of the first split
        query,  # [TILE]
        count,
        used,
        HEAD_DIM: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """The mix of queries [TILE, HEAD_DIM] from the parts of the splits in use."""
        lane = tl.arange(0, HEAD_DIM)
        split = tl.arange(0, SPLITS)
        live = query < count
        there = (split < used)[:, None] & live[None, :]
        place = first + split[:, None] * count + query[None, :]
        tops = tl.load(highest + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(totals + place, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts + place[:, :, None] * HEAD_DIM + lane[None, None, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )  # [SPLITS, TILE, HEAD_DIM]: all at once, for a loop would wait for each split
        top = tl.max(tops, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(sums * tl.exp2(tops - top[None, :]), axis=0)
        weight = tl.exp2(tops - top[None, :]) / tl.where(total > 0, total, 1.0)[None, :]
        return tl.sum(part * weight[:, :, None], axis=0)

    @triton.jit
    def _attend(
        query,
        keys,
        values,
        slots,
        starts,
        mixed,
        parts,
        highest,
        totals,
        counters,
        n,
        capacity,
        window,
        slot_stride,
        head_stride,
        scale,
        CAUSAL: tl.constexpr,
        TILES: tl.constexpr,
        QUERIES: tl.constexpr,
        LIVE: tl.constexpr,
        JOINED: tl.constexpr,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK: tl.constexpr,
        SPLITS: tl.constexpr,
        WINDOWED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one split of one tile of queries of one kv head of one row."""
        wait_for_last(OVERLAP)
        split, row = tl.program_id(0), tl.program_id(2)
        head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
        start = tl.load(starts + row).to(tl.int32)
        end, first, each, used = _stretches(start, n, capacity, window, BLOCK, SPLITS, WINDOWED)
        if split >= used:
            return
        count = n * GROUP
        lane = tl.arange(0, HEAD_DIM)
        index = tile * LIVE + tl.arange(0, QUERIES)
        live = (index < count) & (tl.arange(0, QUERIES) < LIVE)
        place = _places(row, head, index, n, KV_HEADS, GROUP)
        asked = tl.load(
            query + place[:, None] * HEAD_DIM + lane[None, :], mask=live[:, None], other=0.0
        )
        position = start + index // GROUP
        offset = tl.load(slots + row) * slot_stride + head * head_stride
        keys += offset
        values += offset

        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mix = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
        low = (first + split * each) * BLOCK
        high = tl.minimum(low + each * BLOCK, end)
        for at in range(low, high, BLOCK):
            spot = at + tl.arange(0, BLOCK)
            inside = spot < end
            key = tl.load(
                keys + spot[None, :] * HEAD_DIM + lane[:, None], mask=inside[None, :], other=0.0
            )
            # In powers of two: log2(e) is part of the scale.
            score = tl.dot(asked, key, input_precision="ieee") * (scale * 1.4426950408889634)
            seen = inside[None, :] & live[:, None]
            if CAUSAL:
                seen = seen & (spot[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (tl.abs(position[:, None] - spot[None, :]) < window)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weight, axis=1)
            value = tl.load(
                values + spot[:, None] * HEAD_DIM + lane[None, :], mask=inside[:, None], other=0.0
            )
            mix = mix * fade[:, None]
            mix = tl.dot(weight.to(value.dtype), value, mix, input_precision="ieee")
            top = higher

        let_next_come(OVERLAP)
        if used == 1:
            mix = mix / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(
                mixed + place[:, None] * HEAD_DIM + lane[None, :],
                mix.to(mixed.dtype.element_ty),
                mask=live[:, None],
            )
            return
        origin = (row * KV_HEADS + head) * SPLITS * count
        own = origin + split * count + index
        tl.store(parts + own[:, None] * HEAD_DIM + lane[None, :], mix, mask=live[:, None])
        tl.store(highest + own, top, mask=live)
        tl.store(totals + own, total, mask=live)
        if JOINED:
            # All threads' parts are written before the one atomic that says so.
            tl.debug_barrier()
            counter = counters + (row * KV_HEADS + head) * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
                tl.store(counter, 0)
                few = tile * LIVE + tl.arange(0, LIVE)
                all_mix = _joined(
                    parts, highest, totals, origin, few, count, used, HEAD_DIM, SPLITS
                )
                spots = _places(row, head, few, n, KV_HEADS, GROUP)
                tl.store(
                    mixed + spots[:, None] * HEAD_DIM + lane[None, :],
                    all_mix.to(mixed.dtype.element_ty),
                    mask=(few < count)[:, None],
                )

    @triton.jit
    def _join(
        starts,
        mixed,
        parts,
        highest,
        totals,
        n,
        capacity,
        window,
        TILE: tl.constexpr,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        BLOCK: tl.constexpr,
        SPLITS: tl.constexpr,
        WINDOWED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for TILE queries of one kv head of one row."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        start = tl.load(starts + row).to(tl.int32)
        _, _, _, used = _stretches(start, n, capacity, window, BLOCK, SPLITS, WINDOWED)
        if used == 1:
            return
        count = n * GROUP
        index = tile * TILE + tl.arange(0, TILE)
        origin = (row * KV_HEADS + head) * SPLITS * count
        mix = _joined(parts, highest, totals, origin, index, count, used, HEAD_DIM, SPLITS)
        place = _places(row, head, index, n, KV_HEADS, GROUP)
        tl.store(
            mixed + place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :],
            mix.to(mixed.dtype.element_ty),
            mask=(index < count)[:, None],
        )
