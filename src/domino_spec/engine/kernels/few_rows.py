"""The product of few rows with a weight: a kernel that reads the weight once, at full speed.

Each program owns some columns of the result and streams its rows of the weight through a deep
pipeline of copies; where columns are too few to keep the GPU busy, several programs share K.

More rows than fill a tile are several tiles, each with programs of its own: every tile reads the
weight again, from the second-level cache if it is small enough (`takes`). A row's result has the
same bits however many rows share its tile. In a taller tile its sums of squares are added up in
another order; in float64 they would be the same, at the cost of 4% of one sequence's step.

Between two products the memory would be idle: the last programs of one add up and write, those of
the next are launched and wait for their first numbers. So a product lets the next kernel come once
its weights are read, no earlier (`overlap` says why), and asks for its own first weights before it
waits for the one ahead.

A weight of 8 or 4 bits (`ScaledWeight`) is unpacked in registers: its numbers are exact in every
type of x, so the product is theirs, and each group's sums are scaled in float32. Zero points are
taken off as they multiply the sum of x, which one more product with ones gives for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.pointwise import SILU, shrink
from domino_spec.engine.kernels.runtime import Gpu, absent, gpu, triton_available
from domino_spec.engine.kernels.scratch import scratch
from domino_spec.quantization.scaled import FEW, ScaledWeight

_TILE_ROWS = (16, 64)
"""Of x in a program's tile: the least that holds all of them, else the last."""
MOST_ROWS = 256
"""Above this the vendor's library does better whatever the weight."""
_MOST_READ = 32 << 20
"""Bytes of a weight that several tiles of rows may read together: beyond, the vendor's library was
faster on an H200."""


def takes(rows: int, dtype: torch.dtype, weight: Tensor | ScaledWeight | None = None) -> bool:
    """Whether so many rows are few, of a product with this weight."""
    if not 1 <= rows <= MOST_ROWS:
        return False
    if rows <= _TILE_ROWS[0]:
        return True
    if dtype == torch.float32:  # no tensor cores: tall tiles leave no registers
        return False
    if isinstance(weight, ScaledWeight) and rows <= FEW:
        return True
    tiles = -(-rows // tile_rows(rows))
    return tiles == 1 or weight is None or tiles * weight.nbytes <= _MOST_READ


def tile_rows(rows: int) -> int:
    """Rows of a program's tile."""
    return next((height for height in _TILE_ROWS if rows <= height), _TILE_ROWS[-1])


def padded(rows: int) -> int:
    """Rows of whole tiles."""
    return -(-rows // tile_rows(rows)) * tile_rows(rows)


@dataclass(frozen=True)
class Plan:
    """How one shape is cut up."""

    rows: int  # of x in a program's tile
    columns: int  # of the result a program owns
    depth: int  # of K, a step of the pipeline
    stages: int  # steps on their way at a time
    split: int  # programs that share K
    swapped: bool = False  # the weight is the left side of the product, x the right one


def plan(
    n: int,
    k: int,
    *,
    gated: bool,
    dtype: torch.dtype,
    rows: int = 1,
    scaled: ScaledWeight | None = None,  # the weight, where it is one of few bits
    on: Gpu = absent,
) -> Plan:
    """A rule through what was fastest on an H200 (132 processors, bfloat16).

    Wide results (from N = 6144) do best with 64 rows of the weight a program and no sharing of K:
    96 programs with six steps on their way, or several programs a processor with fewer steps each.
    Narrow ones share K among up to four programs, about two a processor. Weights of few bits:
    `_few_bits_plan`. Where a program may take less shared memory, fewer steps are on their way.
    """
    made = _unbounded_plan(n, k, gated=gated, dtype=dtype, rows=rows, scaled=scaled, on=on)
    tiles = made.rows + made.columns * (2 if gated else 1)
    fitting = on.shared_memory // (tiles * made.depth * dtype.itemsize)
    return replace(made, stages=min(made.stages, 1 + fitting))


def _unbounded_plan(
    n: int,
    k: int,
    *,
    gated: bool,
    dtype: torch.dtype,
    rows: int,
    scaled: ScaledWeight | None,
    on: Gpu,
) -> Plan:
    wide = n >= 6144
    group = None if scaled is None else scaled.group
    owned = 64 if wide or (n >= 4096 and k >= 8192) else 32 if n >= 2048 else 16
    depth = 128
    if dtype == torch.float32:  # no tensor cores: smaller tiles, for the registers' sake
        owned, depth = min(owned, 32), 32
    few_bits = group is not None and dtype != torch.float32 and rows <= _TILE_ROWS[0]
    if few_bits and k % 256 == 0:
        depth = 256
    if group is not None and group < k:
        depth = min(depth, group & -group)  # a step lies within a group
    if few_bits:
        assert scaled is not None
        eight = scaled.kind != "int4" and scaled.pairs is None and scaled.group >= k
        swapped = eight and n >= 2048 and on.capability[0] == 9
        return _few_bits_plan(n, k, gated=gated, depth=depth, rows=rows, swapped=swapped)
    columns = max(16, owned // 2) if gated else owned
    programs = -(-(n // 2 if gated else n) // columns)
    split = 1
    while not wide and programs * split < 192 and split < 4 and k // (2 * split) >= 8 * depth:
        split *= 2
    stages = 3 if gated else 4 if split > 1 or programs >= 264 else 6
    if rows > _TILE_ROWS[0]:  # several tiles of rows make up for fewer, wider ones of columns
        owned = 64 if n >= 3072 else 32
        columns, stages = (owned // 2, 3) if gated else (owned, 4)
    return Plan(tile_rows(rows), columns, depth, stages, split)


def _few_bits_plan(n: int, k: int, *, gated: bool, depth: int, rows: int, swapped: bool) -> Plan:
    """A rule for all kinds through what was fastest on an H200 for fp8 of Qwen3-8B's shape.

    A byte takes a few instructions to become a number of a product, so the processors are nearly as
    busy as the memory: two or three programs each are wanted, and as few steps as may be. On the
    left of the product the weight's 64 rows are read once by four warps, on the right by each.
    """
    columns = 32 if gated else 64 if swapped else 32 if n >= 6144 else 64 if n >= 2048 else 16
    programs, split = -(-(n // 2 if gated else n) // columns), 1
    while programs * split < 256 and split < 4 and k // (2 * split) >= 8 * min(depth, 128):
        split *= 2
    if k % (depth * split):  # steps past the end would be read for nothing
        depth = min(depth, 128)
    stages = 3 if gated and depth == 256 else 4 if swapped and n >= 6144 else 5
    # Rows of both heights have the same bits: they are the same products, eight rows each.
    height = 8 if swapped and rows <= 8 else _TILE_ROWS[0]
    return Plan(height, columns, depth, stages, split, swapped=swapped)


def launch(
    x: Tensor,  # [m, K]
    squares: Tensor | None,  # [sources, padded m]: divide by the norm they make
    eps: float,
    weight: Tensor | ScaledWeight,  # [N, K] or, of tensors, [groups, n, K]
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = SILU,
    then: Tensor | None = None,  # [N]: the next norm's weights
    out: Tensor | None = None,  # [m, width]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result, and with `then` also the result times it, and its rows' sums of squares."""
    m, k = x.shape
    scaled = weight if isinstance(weight, ScaledWeight) else None
    stored = weight.values if isinstance(weight, ScaledWeight) else weight
    group = stored.shape[-2]
    n = group * (stored.shape[0] if stored.dim() == 3 else 1)
    width = n // 2 if gated else n
    cut = plan(
        n,
        k,
        gated=gated,
        dtype=x.dtype,
        rows=m,
        scaled=scaled,
        on=gpu(x.device),
    )
    tiles = -(-width // cut.columns)
    slabs = -(-m // cut.rows)
    if out is None:
        out = x.new_empty(m, width)
    weighted, sums = None, None
    if then is not None:
        weighted = x.new_empty(m, width)
        sums = x.new_empty(tiles, padded(m), dtype=torch.float32)
    # A part is one or two tiles of sums.
    part = cut.rows * cut.columns * (2 if gated else 1)
    parts, arrivals = (
        scratch(x.device, parts=slabs * tiles * cut.split * part, counters=slabs * tiles)
        if cut.split > 1
        else (out, out)
    )
    # Tiles of rows that read the same of the weight run at the same time.
    _few_rows[(slabs, tiles, cut.split)](
        x,
        stored,
        x if scaled is None else scaled.scales,
        x if squares is None else squares,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        x if then is None else then,
        out if weighted is None else weighted,
        out if sums is None else sums,
        parts,
        arrivals,
        m,
        width,
        x.stride(0),
        0 if squares is None else squares.stride(0),
        0 if sums is None else sums.stride(0),
        stored.stride(-2),
        stored.stride(0) if stored.dim() == 3 else 0,
        0 if scaled is None else scaled.scales.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        **constants(
            cut,
            x.dtype,
            k,
            sources=0 if squares is None else len(squares),
            group=group if stored.dim() == 3 else 0,
            scaled=scaled,
            bias=bias is not None,
            residual=residual is not None,
            gated=gated,
            activation=activation,
            then=then is not None,
        ),
        num_warps=4,
        **overlap(x),
    )
    return out, weighted, sums


PAIRS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def constants(
    cut: Plan,
    dtype: torch.dtype,
    k: int,
    *,
    sources: int = 0,
    group: int = 0,
    scaled: ScaledWeight | None = None,
    bias: bool = False,
    residual: bool = False,
    gated: bool = False,
    activation: str = SILU,
    then: bool = False,
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "STAGES": cut.stages,
        "SPLIT": cut.split,
        "SWAPPED": cut.swapped,
        "K": k,
        "SOURCES": sources,
        "SOURCES_PADDED": 1 << max(sources - 1, 0).bit_length(),
        "GROUP": group,
        "BITS": 16 if scaled is None else 4 if scaled.kind == "int4" else 8,
        "SCALE_COLUMNS": k if scaled is None else scaled.group,
        "SCALE_ROWS": 1 if scaled is None else scaled.row_block,
        "PAIRS": "" if scaled is None or scaled.pairs is None else PAIRS[scaled.pairs],
        "BIAS": bias,
        "RESIDUAL": residual,
        "GATED": gated,
        "ACTIVATION": activation,
        "THEN": then,
        "SHRINK": shrink(dtype),
    }


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import ask_for, let_next_come, wait_for_last
    from domino_spec.engine.kernels.pointwise import activated

    @triton.jit
    def _rounded(values, like):
        """As the reference's next operation would see them."""
        return values.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def _rows_of(weight, row, weight_stride, group_stride, GROUP: tl.constexpr):
        """Where rows of the weight begin; with groups, they lie apart."""
        if GROUP > 0:
            return weight + row // GROUP * group_stride + row % GROUP * weight_stride
        else:  # noqa: RET505 - Triton must not look at both
            return weight + row * weight_stride

    @triton.jit
    def _slab(rows, at, K: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
        """The next DEPTH numbers of each row; past its end, zeros."""
        if EVEN:
            return tl.load(rows + at, eviction_policy=POLICY)
        else:  # noqa: RET505 - Triton must not look at both
            return tl.load(rows + at, mask=at < K, other=0.0, eviction_policy=POLICY)

    @triton.jit
    def _scales_of(scales, group, stride, column, SCALE_ROWS: tl.constexpr, PAIRS: tl.constexpr):
        """A group's scales and zero points for columns of the result, float32."""
        word = tl.load(scales + group * stride + column // SCALE_ROWS)
        if PAIRS == "":
            return word, word
        else:  # noqa: RET505 - Triton must not look at both
            zero = (word >> 16).to(tl.float32)
            if PAIRS == "bf16":
                scale = (word << 16).to(tl.float32, bitcast=True)
            else:
                scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            return scale, zero

    @triton.jit
    def _number(stored, KIND: tl.constexpr):
        """Eight bits as numbers of a type that holds them all; by way of those that are fast."""
        if stored.dtype.is_fp8():
            return stored.to(tl.float16).to(tl.float32).to(KIND)
        else:  # noqa: RET505 - Triton must not look at both
            return stored.to(tl.float32).to(KIND)

    @triton.jit
    def _halves(stored, KIND: tl.constexpr):
        """Low and high four bits q; in half precision as 128 + q or 64 + q, whose bits are those
        of 128 or 64 with q in the fraction. That is a few times less work than to convert them."""
        if KIND == tl.float32:  # noqa: SIM300
            return (stored & 15).to(KIND), (stored >> 4).to(KIND)
        else:  # noqa: RET505 - Triton must not look at both
            word = stored.to(tl.uint16)
            if KIND == tl.bfloat16:  # noqa: SIM300
                low, high = word & 0x0F | 0x4300, word >> 4 | 0x4300
            else:
                low, high = (word & 0x0F) << 4 | 0x5400, word & 0xF0 | 0x5400
            return low.to(KIND, bitcast=True), high.to(KIND, bitcast=True)

    @triton.jit
    def _ones(stored, KIND: tl.constexpr):
        """As many ones as bytes. They seem to come of these, so that a product with them wants x in
        the very order in which the one with the weight does: else x would be copied for each."""
        return ((stored.to(tl.uint8, bitcast=True).to(tl.uint32) >> 8) + 1).to(tl.float32).to(KIND)

    @triton.jit
    def _few_bits(
        total,
        fed,  # [ROWS, DEPTH], or the low halves' share of it
        fed_high,
        rows,
        at,
        scales,
        group,
        stride,
        column,
        K_BYTES: tl.constexpr,
        EVEN: tl.constexpr,
        POLICY: tl.constexpr,
        BITS: tl.constexpr,
        GROUPS: tl.constexpr,
        SCALE_ROWS: tl.constexpr,
        PAIRS: tl.constexpr,
    ):
        """One step's products, scaled where more groups than one share a row."""
        streamed = _slab(rows, at, K_BYTES, EVEN, POLICY)
        part = total
        if GROUPS > 1 or PAIRS != "":
            part = tl.zeros_like(total)
        if BITS == 8:
            part = tl.dot(fed, _number(streamed, fed.dtype).T, part, input_precision="ieee")
        else:
            low, high = _halves(streamed, fed.dtype)
            part = tl.dot(fed, low.T, part, input_precision="ieee")
            part = tl.dot(fed_high, high.T, part, input_precision="ieee")
        if PAIRS != "":
            ones = _ones(streamed, fed.dtype).T
            fed_sums = tl.dot(fed, ones, input_precision="ieee")
            if BITS == 4:
                fed_sums = tl.dot(fed_high, ones, fed_sums, input_precision="ieee")
        if GROUPS > 1 or PAIRS != "":
            scale, zero = _scales_of(scales, group, stride, column, SCALE_ROWS, PAIRS)
            if PAIRS != "":
                if BITS == 4:  # what `_halves` adds
                    if fed.dtype == tl.bfloat16:
                        zero += 128.0
                    elif fed.dtype == tl.float16:
                        zero += 64.0
                part -= fed_sums * zero[None, :]
            part = total + part * scale[None, :]
        return part

    @triton.jit(do_not_specialize=["m"])
    def _few_rows(
        x,
        weight,
        scales,  # [groups, N // SCALE_ROWS], of weights of few bits
        squares,  # [SOURCES, padded m]
        bias,
        residual,
        out,
        then,
        weighted,  # [m, width]
        sums,  # [tiles, padded m]
        parts,  # [slabs, tiles, SPLIT, ROWS * (COLUMNS or 2 * COLUMNS)] float32
        arrivals,  # [slabs, tiles]
        m,
        width,
        x_stride,
        squares_stride,
        sums_stride,
        weight_stride,
        group_stride,
        scales_stride,
        residual_stride,
        out_stride,
        eps,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        STAGES: tl.constexpr,
        SPLIT: tl.constexpr,
        SWAPPED: tl.constexpr,
        K: tl.constexpr,
        SOURCES: tl.constexpr,
        SOURCES_PADDED: tl.constexpr,
        GROUP: tl.constexpr,
        BITS: tl.constexpr,
        SCALE_COLUMNS: tl.constexpr,
        SCALE_ROWS: tl.constexpr,
        PAIRS: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        GATED: tl.constexpr,
        ACTIVATION: tl.constexpr,
        THEN: tl.constexpr,
        SHRINK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one share of K of one tile of columns of one tile of rows."""
        slab = tl.program_id(0)
        tile = tl.program_id(1)
        share = tl.program_id(2)
        row = slab * ROWS + tl.arange(0, ROWS)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        # Of a weight of few bits a step is counted in bytes, which of 4 bits are two numbers.
        HALVES: tl.constexpr = 2 if BITS == 4 else 1
        STEP: tl.constexpr = DEPTH // HALVES
        K_STEP: tl.constexpr = K // HALVES
        GROUPS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        depth = tl.arange(0, STEP)
        fed_depth = depth[None, :] if BITS != 4 else (depth // 16 * 32 + depth % 16)[None, :]
        # Rows of x past the end are masked: to read the last one again would be sixteen reads of
        # the same lines by all programs at once, and one row would cost more than sixteen. Columns
        # past the end are read again and thrown away.
        live = (row < m)[:, None]
        x_rows = x + row[:, None] * x_stride
        own_column = tl.minimum(column, width - 1)
        own = own_column.to(tl.int64)[:, None]
        first_rows = _rows_of(weight, own, weight_stride, group_stride, GROUP)
        second_rows = weight + (own + width) * weight_stride
        STEPS: tl.constexpr = tl.cdiv(K, DEPTH * SPLIT)
        EVEN: tl.constexpr = K % (DEPTH * SPLIT) == 0
        ASKED: tl.constexpr = STEP if STEP > 128 or BITS == 16 else 128
        ask_for(first_rows, share * STEPS * STEP, K_STEP, ASKED, OVERLAP)
        ask_for(second_rows, share * STEPS * STEP, K_STEP, ASKED, OVERLAP and GATED)
        wait_for_last(OVERLAP)

        first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # the result, or the gate
        second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # up, when gated
        inside = live & (column < width)[None, :]
        # What is wanted after the loop is loaded now, so that the end need not wait for it.
        if BIAS:
            shift = tl.load(bias + column, mask=column < width, other=0.0)[None, :]
        if BIAS and GATED:
            second_shift = tl.load(bias + width + column, mask=column < width, other=0.0)[None, :]
        if RESIDUAL:
            place = residual + row[:, None] * residual_stride + column[None, :]
            added = tl.load(place, mask=inside, other=0.0)
        if THEN:
            ahead = tl.load(then + column, mask=column < width, other=0.0)
        if SOURCES > 0:
            source = tl.arange(0, SOURCES_PADDED)[:, None]
            pieces = tl.load(
                squares + source * squares_stride + row[None, :], mask=source < SOURCES, other=0.0
            )
        # Tall tiles may be several, which read the same of the weight.
        POLICY: tl.constexpr = "evict_first" if ROWS <= 16 else ""
        if SWAPPED:  # gate and up take turns in one tile of the weight, as tall as it may be
            BOTH: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
            turn = tl.arange(0, BOTH)
            if GATED:
                own_row = tl.minimum(tile * COLUMNS + turn // 2, width - 1) + turn % 2 * width
            else:
                own_row = tl.minimum(tile * COLUMNS + turn, width - 1)
            both_rows = _rows_of(
                weight, own_row.to(tl.int64)[:, None], weight_stride, group_stride, GROUP
            )
            # Of more than eight rows Triton would take Hopper's larger products, which want what is
            # on their left in an order that costs more to read than they spare.
            HALF: tl.constexpr = 8 if ROWS == 16 else ROWS
            half_row = slab * ROWS + tl.arange(0, HALF)[:, None]
            both = tl.zeros((BOTH, HALF), dtype=tl.float32)
            both_later = tl.zeros((BOTH, HALF), dtype=tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            at = ((share * STEPS + step) * STEP + depth)[None, :]
            fed_at = (share * STEPS + step) * DEPTH + fed_depth
            fed = tl.load(
                x_rows + fed_at, mask=live & (fed_at < K), other=0.0, eviction_policy="evict_last"
            )
            if SWAPPED:
                streamed = _slab(both_rows, at, K, EVEN, POLICY)
                numbers = _number(streamed, fed.dtype)
                half_fed = tl.load(
                    x + half_row * x_stride + fed_at, mask=(half_row < m) & (fed_at < K), other=0.0,
                    eviction_policy="evict_last",
                )  # fmt: skip
                both = tl.dot(numbers, half_fed.T, both, input_precision="ieee")
                if HALF < ROWS:
                    later = half_row + HALF
                    half_fed = tl.load(
                        x + later * x_stride + fed_at, mask=(later < m) & (fed_at < K), other=0.0,
                        eviction_policy="evict_last",
                    )  # fmt: skip
                    both_later = tl.dot(numbers, half_fed.T, both_later, input_precision="ieee")
            elif BITS == 16:
                streamed = _slab(first_rows, at, K, EVEN, POLICY)
                first = tl.dot(fed, streamed.T, first, input_precision="ieee")
                if GATED:
                    streamed = _slab(second_rows, at, K, EVEN, POLICY)
                    second = tl.dot(fed, streamed.T, second, input_precision="ieee")
            else:
                fed_high = fed
                if BITS == 4:
                    fed_high = tl.load(
                        x_rows + fed_at + 16, mask=live & (fed_at < K), other=0.0,
                        eviction_policy="evict_last",
                    )  # fmt: skip
                # Steps past the end, which are of zeros, read the last group's scales.
                group = tl.minimum((share * STEPS + step) * DEPTH // SCALE_COLUMNS, GROUPS - 1)
                first = _few_bits(
                    first, fed, fed_high, first_rows, at,
                    scales, group, scales_stride, own_column,
                    K_STEP, EVEN, POLICY, BITS, GROUPS, SCALE_ROWS, PAIRS,
                )  # fmt: skip
                if GATED:
                    second = _few_bits(
                        second, fed, fed_high, second_rows, at,
                        scales, group, scales_stride, own_column + width,
                        K_STEP, EVEN, POLICY, BITS, GROUPS, SCALE_ROWS, PAIRS,
                    )  # fmt: skip
        let_next_come(OVERLAP)
        if SWAPPED and HALF < ROWS:
            both = tl.join(both, both_later).permute(0, 2, 1).reshape(BOTH, ROWS)
        if SWAPPED and GATED:
            gates, ups = both.reshape(COLUMNS, 2, ROWS).permute(0, 2, 1).split()
            first, second = gates.T, ups.T
        elif SWAPPED:
            first = both.T

        if SPLIT > 1:
            SUMS: tl.constexpr = ROWS * COLUMNS
            PART: tl.constexpr = 2 * SUMS if GATED else SUMS
            within = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            own_tile = slab * tl.num_programs(1) + tile
            group = parts + own_tile.to(tl.int64) * SPLIT * PART
            mine = group + share * PART
            tl.store(mine + within, first)
            if GATED:
                tl.store(mine + SUMS + within, second)
            tl.debug_barrier()  # every thread has written before one of them says so
            if tl.atomic_add(arrivals + own_tile, 1, sem="acq_rel", scope="gpu") < SPLIT - 1:
                return
            first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                part = group + other * PART
                first += tl.load(part + within, cache_modifier=".cg")
                if GATED:
                    second += tl.load(part + SUMS + within, cache_modifier=".cg")
            tl.store(arrivals + own_tile, 0)

        if BITS < 16 and GROUPS == 1 and PAIRS == "":  # one scale a row of the weight
            first *= tl.load(scales + own_column // SCALE_ROWS)[None, :]
            if GATED:
                second *= tl.load(scales + (own_column + width) // SCALE_ROWS)[None, :]
        if SOURCES > 0:
            total = tl.sum(pieces, axis=0)
            scale = tl.rsqrt(tl.where(row < m, total / K, 1.0) + eps) / SHRINK
            first = first * scale[:, None]
            second = second * scale[:, None]
        if BIAS:
            first += shift
        if BIAS and GATED:
            second += second_shift
        result = _rounded(first, out)
        if GATED:
            gate = _rounded(activated(result, ACTIVATION), out)
            result = _rounded(gate * _rounded(second, out), out)
        if RESIDUAL:
            result += added.to(tl.float32)
        kept = result.to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_stride + column[None, :], kept, mask=inside)
        if THEN:
            wide = tl.where(inside, kept.to(tl.float32), 0.0)
            onward = (wide * (ahead.to(tl.float32) * SHRINK)[None, :]).to(out.dtype.element_ty)
            tl.store(weighted + row[:, None] * width + column[None, :], onward, mask=inside)
            tl.store(sums + tile * sums_stride + row, tl.sum(wide * wide, axis=1))
