"""The kernels of `attention`: a few queries over stretches of the context, then joined.

A program takes some queries of one kv head of one row and one stretch of the row's positions. How
many programs there are follows from shapes alone, so that a captured graph serves any length; how
long their stretches are follows from how far a query sees, so that short contexts use all of them
too. A second launch joins the stretches. Under a window with sink tokens the blocks of these come
first and those between them and the window are left out: of the row's own blocks, numbered through.

What a query gets does not depend on how many others are asked with it, to the last bit: stretches
are its own, tiles have one size, and sums are added up in one order. So a token that is verified in
a block gets what it would have got alone. So does a node of a tree: stretches that reach new
tokens, of which a node has two at most, have a program a node, which reads its own ancestors in the
order of their positions (`paths`, for each node the new tokens on the way to it). Packed rows have
different numbers of queries, which lie one row's after the other's; programs are made for the most
a row may have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.drafter.masks import Window
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.paging import paging
from domino_spec.engine.kernels.runtime import gpu, triton_available

PROGRAMS = 132
"""How many programs to aim at when one token is asked: the multiprocessors of an H200."""
MAX_SPLITS = 32
TILE = 16
"""Queries (tokens times query heads of a kv head) that a program takes."""
BLOCK = 64
"""Positions a program reads at once."""
JOINED_AT_ONCE = 4096
"""How many numbers of the parts a program of the second launch takes."""


def effort(head_dim: int, size: int, shared_memory: int, *, block: int = BLOCK) -> tuple[int, int]:
    """(warps, stages) for numbers of `size` bytes: the same for one token and a block.

    Two warps were best for both on an H200 where their registers hold a tile. Rows of a cache that
    are wider than 512 bytes leave no room to have several tiles on their way, and on GPUs with less
    shared memory than an H200 those of 512 bytes leave room for fewer.
    """
    row = head_dim * size
    if row > 512:
        return 16, 1
    tiles = shared_memory // (2 * block * row + TILE * row)  # of keys and values, and the queries
    return 2 if size <= 2 and row <= 256 else 4, min(3, 1 + tiles)


def launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    *,
    causal: bool,
    window: Window | None,
    scale: float,
    positions: Tensor | None = None,  # [rows, n] int64
    paths: Tensor | None = None,  # [rows, n, n] int64
    offsets: Tensor | None = None,  # [rows + 1] int64: where each row's queries begin
    count: int = 0,
    sinks: Tensor | None = None,  # [heads]
    block: int = BLOCK,
    splits: int | None = None,
) -> Tensor:
    """The kernels; the last two arguments are what shapes decide in production.

    With `offsets` queries are packed, [tokens, 1, heads, head_dim], up to `count` a row.
    """
    rows, n, heads, head_dim = query.shape
    shape = (rows, n)
    if offsets is not None:
        assert causal
        assert paths is None
        rows, n = len(pages), count
    kv_heads, page = keys.shape[1:3]
    capacity = pages.shape[1] * page
    group, lanes = heads // kv_heads, triton.next_power_of_2(head_dim)
    assert query.is_contiguous()
    assert keys.stride() == values.stride()
    assert keys.stride()[2:] == (head_dim, 1)
    assert pages.is_contiguous()
    assert pages.shape[1] == 1 or page % block == 0, "a tile of keys lies in one page"
    assert (positions is None) == (paths is None), "a tree's nodes have positions"
    assert positions is None or positions.is_contiguous()
    assert paths is None or paths.is_contiguous()
    if splits is None:
        # Not by n, nor by the cache's size: a token alone is cut up like one in a block, and like
        # one in an engine that keeps more room, as those with drafts do.
        splits = min(PROGRAMS // (rows * kv_heads), MAX_SPLITS)
        splits = 1 << max(splits, 1).bit_length() - 1

    # Each split's mix before division, its highest score and its sum of weights.
    wide = torch.float32
    parts = query.new_empty(rows, kv_heads, splits, n * group, head_dim, dtype=wide)
    highest = query.new_empty(rows, kv_heads, splits, n * group, dtype=wide)
    totals = torch.empty_like(highest)
    mixed = query.new_empty(*shape, heads * head_dim)
    assert splits & (splits - 1) == 0
    size, sink_tokens = (0, 0) if window is None else window
    assert paths is None or not sink_tokens, "a tree is the target's, whose windows have no sinks"
    shared = (n, capacity, size, sink_tokens, splits.bit_length() - 1)
    warps, stages = effort(
        lanes, query.element_size(), gpu(query.device).shared_memory, block=block
    )
    if paths is not None:  # many short programs: fewer tiles on their way let more run at a time
        stages = min(stages, 2)
    shapes = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "LANES": lanes,
        "BLOCK": block,
        "WINDOWED": window is not None,
        "SINK_TOKENS": sink_tokens > 0,
        **overlap(query),
    }
    cut = paging(pages, keys)
    # Those of the last stretches, which short contexts leave idle, come last: they would take room.
    tiles, turns = triton.cdiv(n * group, TILE), splits
    if paths is not None:
        assert n <= block, "a node's last two stretches reach all new tokens"
        turns += 2 * triton.cdiv(n * triton.cdiv(group, TILE), tiles)
    _attend[(tiles, kv_heads * rows, turns)](
        query,
        keys,
        values,
        pages,
        starts,
        positions,
        paths,
        offsets,
        sinks,
        mixed,
        parts,
        highest,
        totals,
        *shared,
        pages.shape[1],
        keys.stride(0),
        keys.stride(1),
        scale,
        QUERIES=TILE,
        CAUSAL=causal and n > 1,  # one token alone is the last one too, which costs less
        num_warps=warps,
        num_stages=stages,
        **shapes,
        **cut,
    )
    if splits > 1:
        joined = max(1, JOINED_AT_ONCE // (splits * lanes))
        _join[(triton.cdiv(n * group, joined), kv_heads, rows)](
            starts,
            positions,
            offsets,
            sinks,
            mixed,
            parts,
            highest,
            totals,
            *shared,
            TILE=joined,
            CAUSAL=causal,
            SPLITS=splits,
            num_warps=4,
            **shapes,
        )
    return mixed


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last
    from domino_spec.engine.kernels.paging import page_of

    @triton.jit
    def _stretches(
        query,  # [QUERIES]: which of n * GROUP
        start,
        positions,  # of the row's new tokens, or None: their places
        n,
        capacity,
        window,
        sink_tokens,
        log_splits,
        CAUSAL: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK: tl.constexpr,
        WINDOWED: tl.constexpr,
        SINK_TOKENS: tl.constexpr,
    ):
        """For each query how far it sees, and how that is split.

        (position, end of what it sees, first block, blocks of sinks before it, blocks a split,
        splits)
        """
        position = start + tl.minimum(query // GROUP, n - 1)
        if positions is not None:
            position = tl.load(positions + tl.minimum(query // GROUP, n - 1)).to(tl.int32)
        last = position
        if not CAUSAL:
            last = position * 0 + start + n - 1
        end = tl.minimum(last + 1, capacity)
        stop = tl.cdiv(end, BLOCK)
        first = position * 0
        if WINDOWED:
            first = tl.minimum(tl.maximum(position - window + 1, 0) // BLOCK, stop - 1)
        far = position * 0
        if SINK_TOKENS:
            far = tl.minimum(tl.cdiv(sink_tokens, BLOCK), first)
        count = far + stop - first
        each = (count + (1 << log_splits) - 1) >> log_splits
        return position, end, first, far, each, tl.cdiv(count, each)

    @triton.jit
    def _queries(row, n, offsets):
        """(where a row's queries begin among all, how many it has)."""
        base, own = row * n, n
        if offsets is not None:
            base = tl.load(offsets + row).to(tl.int32)
            own = tl.load(offsets + row + 1).to(tl.int32) - base
        return base, own

    @triton.jit
    def _places(base, head, query, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
        """Which of [tokens, heads] a head's queries are."""
        return ((base + query // GROUP) * KV_HEADS + head) * GROUP + query % GROUP

    @triton.jit
    def _within(mask, lane, HEAD_DIM: tl.constexpr, LANES: tl.constexpr):
        """The mask without the lanes past a head whose width is no power of two."""
        if LANES > HEAD_DIM:
            mask = mask & (lane < HEAD_DIM)
        return mask

    @triton.jit
    def _over_tile(
        asked, keys, values, places, inside, seen, scale, top, total, mix,
        HEAD_DIM: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        """Queries over keys and values at some places: (highest score, sum of weights, mix)."""
        lane = tl.arange(0, LANES)
        # Lanes before places: what is the same for each tile is added to the rest but once.
        key = tl.load(
            keys + lane[:, None] + places[None, :] * HEAD_DIM,
            mask=_within(inside[None, :], lane[:, None], HEAD_DIM, LANES),
            other=0.0,
        )
        # In powers of two: log2(e) is part of the scale.
        score = tl.dot(asked, key, input_precision="ieee") * (scale * 1.4426950408889634)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weight, axis=1)
        value = tl.load(
            values + lane[None, :] + places[:, None] * HEAD_DIM,
            mask=_within(inside[:, None], lane[None, :], HEAD_DIM, LANES),
            other=0.0,
        )
        mix = mix * fade[:, None]
        mix = tl.dot(weight.to(value.dtype), value, mix, input_precision="ieee")
        return higher, total, mix

    @triton.jit
    def _with_sink(sinks, head, query, top, total, GROUP: tl.constexpr):
        """(what a mix fades by, sum of weights), once a head's sink is counted."""
        sink = tl.load(sinks + head * GROUP + query % GROUP).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        return fade, total * fade + tl.exp2(sink - higher)

    # What a batch's size or a depth decides is asked for at run time: these numbers place a
    # program, once, and each value compiled in would be another kernel to compile.
    _PLACING = ["n", "capacity", "log_splits", "row_pages"]

    @triton.jit(do_not_specialize=_PLACING)
    def _attend(
        query,
        keys,
        values,
        pages,  # [rows, row_pages]
        starts,
        positions,  # [rows, n], or None
        paths,  # [rows, n, n], or None
        offsets,  # [rows + 1], or None
        sinks,  # [heads], or None
        mixed,
        parts,
        highest,
        totals,
        n,
        capacity,
        window,
        sink_tokens,
        log_splits,
        row_pages,
        page_stride,
        head_stride,
        scale,
        QUERIES: tl.constexpr,
        CAUSAL: tl.constexpr,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        WINDOWED: tl.constexpr,
        SINK_TOKENS: tl.constexpr,
        OVERLAP: tl.constexpr,
        PAGE: tl.constexpr,
    ):
        """One program for one split of one tile of queries of one kv head of one row."""
        wait_for_last(OVERLAP)
        tile, split = tl.program_id(0), tl.program_id(2)
        head, row = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
        start = tl.load(starts + row).to(tl.int32)
        count = n * GROUP
        base, own_n = _queries(row, n, offsets)
        index = tile * QUERIES + tl.arange(0, QUERIES)
        live = index < own_n * GROUP
        if paths is not None:
            # Before and after the programs that share what all nodes see: each for one node, whose
            # own ancestors it reads. First its last stretch, at the end the one before, which
            # seldom reaches new tokens.
            alone_tiles: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
            turns = tl.cdiv(n * alone_tiles, tl.num_programs(0))
            split -= turns
            again = split >> log_splits  # 0 for those that share; negative before them
            apart = again != 0
            extra = (split + tl.where(again < 0, turns, -(1 << log_splits))) * tl.num_programs(0)
            extra += tile
            token = extra // alone_tiles
            member = extra % alone_tiles * QUERIES + tl.arange(0, QUERIES)
            index = tl.where(apart, token * GROUP + member, index)
            live = tl.where(apart, (member < GROUP) & (token < n), live)
        if positions is not None:
            positions += row * n
        position, end, first, far, each, used = _stretches(
            index, start, positions, own_n, capacity, window, sink_tokens, log_splits,
            CAUSAL, GROUP, BLOCK, WINDOWED, SINK_TOKENS,
        )  # fmt: skip
        if paths is not None:
            own_used = tl.max(tl.where(live, used, 0), axis=0)
            split = tl.where(apart, own_used - tl.where(again < 0, 1, 2), split)
        takes = split < used
        if offsets is not None:
            takes = takes & live
        number = split * each  # of its first block, among those of sinks and window
        if SINK_TOKENS:
            sink_low = tl.minimum(number, far) * BLOCK
            sink_high = tl.minimum(tl.minimum(number + each, far) * BLOCK, sink_tokens)
            each -= tl.minimum(tl.maximum(far - number, 0), each)  # those of them that are sinks'
            number = tl.maximum(number - far, 0)
        low = (first + number) * BLOCK
        high = tl.minimum(low + each * BLOCK, end)
        border = start // BLOCK * BLOCK  # from here on nodes see different tokens
        if paths is not None:
            takes = takes & live & (split >= 0) & ((high > border) == apart)
        lowest = tl.min(tl.where(takes, low, capacity), axis=0)
        furthest = tl.max(tl.where(takes, high, 0), axis=0)
        nothing = furthest <= lowest
        if SINK_TOKENS:
            first_sink = tl.min(tl.where(takes, sink_low, capacity), axis=0)
            last_sink = tl.max(tl.where(takes, sink_high, 0), axis=0)
            nothing = nothing & (last_sink <= first_sink)
        if nothing:
            return
        lane = tl.arange(0, LANES)
        place = _places(base, head, index, KV_HEADS, GROUP)
        asked = tl.load(
            query + place[:, None] * HEAD_DIM + lane[None, :],
            mask=_within(live[:, None], lane[None, :], HEAD_DIM, LANES),
            other=0.0,
        )
        keys += head * head_stride
        values += head * head_stride
        pages += row * row_pages

        step = tl.arange(0, BLOCK)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mix = tl.zeros([QUERIES, LANES], tl.float32)
        if SINK_TOKENS:
            for at in range(first_sink, last_sink, BLOCK):
                spot = at + tl.arange(0, BLOCK)
                seen = (spot[None, :] >= sink_low[:, None]) & (spot[None, :] < sink_high[:, None])
                page, in_page = page_of(pages, at, at < capacity, PAGE)
                found = page * page_stride
                top, total, mix = _over_tile(
                    asked, keys + found, values + found, in_page + step, spot < last_sink, seen,
                    scale, top, total, mix, HEAD_DIM, LANES,
                )  # fmt: skip
        alike = furthest  # up to where all nodes look at the same keys
        if paths is not None:
            alike = tl.minimum(furthest, border)
        page, in_page = page_of(pages, lowest, lowest < capacity, PAGE)
        for at in range(lowest, alike, BLOCK):
            # A query's own stretch ends where it stops to see. What lies outside adds zeros.
            seen = (step[None, :] >= (low - at)[:, None]) & (step[None, :] < (high - at)[:, None])
            if WINDOWED:
                near = tl.abs((position - at)[:, None] - step[None, :]) < window
                if SINK_TOKENS:
                    near = near | (step[None, :] < sink_tokens - at)
                seen = seen & near
            found = page * page_stride
            top, total, mix = _over_tile(
                asked, keys + found, values + found, in_page + step, step < furthest - at, seen,
                scale, top, total, mix, HEAD_DIM, LANES,
            )  # fmt: skip
            if PAGE > 0:  # found while this tile is worked on
                page, in_page = page_of(pages, at + BLOCK, at + BLOCK < alike, PAGE)
            else:
                in_page += BLOCK
        if paths is not None:
            for at in range(tl.maximum(lowest, border), furthest, BLOCK):
                spot = at + tl.arange(0, BLOCK)
                seen = (spot[None, :] >= low[:, None]) & (spot[None, :] < high[:, None])
                if WINDOWED:
                    seen = seen & (tl.abs(position[:, None] - spot[None, :]) < window)
                new = (spot >= start) & (spot < furthest)
                node = tl.load(paths + (row * n + token) * n + spot - start, mask=new, other=0)
                places = tl.where(new, start + node.to(tl.int32), spot)
                there = (spot < furthest) & (places < capacity)
                own, spots = page_of(pages, places, there, PAGE)
                spots += own * (page_stride // HEAD_DIM)
                top, total, mix = _over_tile(
                    asked, keys, values, spots, there, seen, scale, top, total, mix,
                    HEAD_DIM, LANES,
                )  # fmt: skip

        let_next_come(OVERLAP)
        alone = live & (used == 1) & takes
        whole, weights = mix, total
        if sinks is not None:
            fade, weights = _with_sink(sinks, head, index, top, total, GROUP)
            whole *= fade[:, None]
        whole = whole / tl.where(weights > 0, weights, 1.0)[:, None]
        tl.store(
            mixed + place[:, None] * HEAD_DIM + lane[None, :],
            whole.to(mixed.dtype.element_ty),
            mask=_within(alone[:, None], lane[None, :], HEAD_DIM, LANES),
        )
        shared = live & (used > 1) & takes
        own = (((row * KV_HEADS + head) << log_splits) + split) * count + index
        tl.store(
            parts + own[:, None] * HEAD_DIM + lane[None, :],
            mix,
            mask=_within(shared[:, None], lane[None, :], HEAD_DIM, LANES),
        )
        tl.store(highest + own, top, mask=shared)
        tl.store(totals + own, total, mask=shared)

    @triton.jit(do_not_specialize=_PLACING)
    def _join(
        starts,
        positions,
        offsets,
        sinks,
        mixed,
        parts,
        highest,
        totals,
        n,
        capacity,
        window,
        sink_tokens,
        log_splits,
        TILE: tl.constexpr,
        SPLITS: tl.constexpr,
        CAUSAL: tl.constexpr,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        LANES: tl.constexpr,
        BLOCK: tl.constexpr,
        WINDOWED: tl.constexpr,
        SINK_TOKENS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for TILE queries of one kv head of one row."""
        wait_for_last(OVERLAP)
        tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        start = tl.load(starts + row).to(tl.int32)
        count = n * GROUP
        base, own_n = _queries(row, n, offsets)
        index = tile * TILE + tl.arange(0, TILE)
        if positions is not None:
            positions += row * n
        _, _, _, _, _, used = _stretches(
            index, start, positions, own_n, capacity, window, sink_tokens, log_splits,
            CAUSAL, GROUP, BLOCK, WINDOWED, SINK_TOKENS,
        )  # fmt: skip
        shared = (index < own_n * GROUP) & (used > 1)
        lane = tl.arange(0, LANES)
        split = tl.arange(0, SPLITS)
        there = (split[:, None] < used[None, :]) & shared[None, :]
        place = ((row * KV_HEADS + head) * SPLITS + split[:, None]) * count + index[None, :]
        tops = tl.load(highest + place, mask=there, other=float("-inf"))
        sums = tl.load(totals + place, mask=there, other=0.0)
        part = tl.load(
            parts + place[:, :, None] * HEAD_DIM + lane[None, None, :],
            mask=_within(there[:, :, None], lane[None, None, :], HEAD_DIM, LANES),
            other=0.0,
        )  # [SPLITS, TILE, LANES]: all at once, for a loop would wait for each split
        top = tl.max(tops, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(tops - top[None, :])
        total = tl.sum(sums * weight, axis=0)
        mix = tl.sum(part * weight[:, :, None], axis=0)
        if sinks is not None:
            fade, total = _with_sink(sinks, head, index, top, total, GROUP)
            mix *= fade[:, None]
        mix = mix / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            mixed + _places(base, head, index, KV_HEADS, GROUP)[:, None] * HEAD_DIM
            + lane[None, :],
            mix.to(mixed.dtype.element_ty),
            mask=_within(shared[:, None], lane[None, :], HEAD_DIM, LANES),
        )  # fmt: skip
        let_next_come(OVERLAP)  # a product: no earlier (`overlap`)
