"""A linear layer for few rows, with what stands before and after it in a transformer.

With at most 64 rows a product costs what it takes to read the weights, so everything else must
ride along: the norm before it, the gate, the bias, the residual. Each program owns some columns
of the result and streams its rows of the weight through a deep pipeline of copies; where columns
are too few to keep the GPU busy, several programs share K (split-K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.fast.kernels.packing import Weight, product
from domino_spec.fast.kernels.runtime import triton_available, usable
from domino_spec.fast.kernels.scratch import scratch

MOST_ROWS = 64
"""Above this, arithmetic begins to count and the vendor's library does better."""


def linear(
    x: Tensor,  # [m, K]
    weight: Weight,  # [N, K]
    *,
    norm: Tensor | None = None,  # [K]
    eps: float = 0.0,
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [m, width]
    gated: bool = False,
) -> Tensor:  # [m, width]
    """`x @ weight.T`, perhaps of the RMS-normed x, perhaps gated, plus bias and residual.

    width is N, or N // 2 when gated: then weight's rows are [gate; up] and the result is
    silu(gate) * up. The kernel rounds where the twin does, but for the norm: the twin feeds
    round(round(x / rms) * norm) to the product, the kernel round(x * norm), and divides the
    float32 sums by rms. So it rounds once where the twin rounds twice.
    """
    if isinstance(weight, Tensor) and usable(x) and 1 <= x.shape[0] <= MOST_ROWS:
        rows_lie_whole = x.stride(1) == 1 and weight.stride(1) == 1
        if rows_lie_whole:
            return _launch(x, weight, norm, eps, bias, residual, gated)
    return linear_twin(x, weight, norm=norm, eps=eps, bias=bias, residual=residual, gated=gated)


def linear_twin(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """What `linear` computes, rounded as Transformers' modules would."""
    if norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        x = norm * wide.to(x.dtype)
    result = product(x, weight, bias)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    return result if residual is None else residual + result


@dataclass(frozen=True)
class Plan:
    """How one shape is cut up."""

    rows: int  # of x a program takes: 16, 32 or 64
    columns: int  # of the result a program owns
    depth: int  # of K, a step of the pipeline
    stages: int  # steps on their way at a time
    split: int  # programs that share K


def plan(m: int, n: int, k: int, *, gated: bool, dtype: torch.dtype) -> Plan:
    """A rule through what was fastest on an H200 (132 processors; 16 rows, bfloat16).

    There, 64 rows of the weight a program were best from N = 6144 on, 32 below. 96 programs with
    six steps on their way read 3.2 TB/s; from two programs a processor on, four steps do and leave
    room for both. A long K is worth sharing until about 200 programs run.
    """
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    owned = 16 if n < 2048 else 32 if n < 6144 else 64  # rows of the weight a program reads
    depth = 128
    if dtype == torch.float32:  # no tensor cores: smaller tiles, for the registers' sake
        owned, depth = min(owned, 32), 32
    columns = max(16, owned // 2) if gated else owned
    programs = -(-(n // 2 if gated else n) // columns)
    enough = 200 if k >= 8192 else 96
    split = 1
    while programs * split < enough and split < 4 and k // (2 * split) >= 8 * depth:
        split *= 2
    stages = 4 if owned == 64 and programs * split >= 264 else 6
    return Plan(rows, columns, depth, stages, split)


def _launch(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    width = n // 2 if gated else n
    cut = plan(m, n, k, gated=gated, dtype=x.dtype)
    tiles = -(-width // cut.columns)
    out = x.new_empty(m, width)
    # A part is one or two tiles of sums and a row of sums of squares.
    part = cut.rows * (cut.columns * (2 if gated else 1) + 1)
    parts, arrivals = (
        scratch(x.device, parts=tiles * cut.split * part, counters=tiles)
        if cut.split > 1
        else (out, out)
    )
    _linear_kernel[(tiles, cut.split)](
        x,
        weight,
        x if norm is None else norm,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        parts,
        arrivals,
        m,
        width,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        **constants(
            cut,
            x.dtype,
            k,
            norm=norm is not None,
            bias=bias is not None,
            residual=residual is not None,
            gated=gated,
        ),
        num_warps=4,
    )
    return out


def constants(
    cut: Plan, dtype: torch.dtype, k: int, *, norm: bool, bias: bool, residual: bool, gated: bool
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "STAGES": cut.stages,
        "SPLIT": cut.split,
        "K": k,
        "NORM": norm,
        "BIAS": bias,
        "RESIDUAL": residual,
        "GATED": gated,
        # x * norm could leave float16's range before rms brings it back.
        "SHRINK": 1 / 64 if dtype == torch.float16 else 1.0,
    }


if triton_available():
    import triton
    import triton.language as tl

    @triton.jit
    def _rounded(values, like):
        """As the twin's next operation would see them."""
        return values.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def _slab(rows, at, K: tl.constexpr, EVEN: tl.constexpr, POLICY: tl.constexpr):
        """The next DEPTH numbers of each row; past its end, zeros."""
        if EVEN:
            return tl.load(rows + at, eviction_policy=POLICY)
        else:  # noqa: RET505 - Triton must not look at both
            return tl.load(rows + at, mask=at < K, other=0.0, eviction_policy=POLICY)

    @triton.jit(do_not_specialize=["m"])
    def _linear_kernel(
        x,
        weight,
        norm,
        bias,
        residual,
        out,
        parts,  # [tiles, SPLIT, ROWS * (COLUMNS or 2 * COLUMNS, and 1)] float32
        arrivals,  # [tiles]
        m,
        width,
        x_stride,
        weight_stride,
        residual_stride,
        eps,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        STAGES: tl.constexpr,
        SPLIT: tl.constexpr,
        K: tl.constexpr,
        NORM: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        GATED: tl.constexpr,
        SHRINK: tl.constexpr,
    ):
        tile = tl.program_id(0)
        share = tl.program_id(1)
        row = tl.arange(0, ROWS)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        # Rows of x past the end are masked: to read the last one again would be sixteen reads of
        # the same lines by all programs at once, and one row would cost more than sixteen. Columns
        # past the end are read again and thrown away.
        live = (row < m)[:, None]
        x_rows = x + row[:, None] * x_stride
        own = tl.minimum(column, width - 1).to(tl.int64)[:, None]
        first_rows = weight + own * weight_stride
        second_rows = weight + (own + width) * weight_stride

        first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # the result, or the gate
        second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)  # up, when gated
        squares = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
        STEPS: tl.constexpr = tl.cdiv(K, DEPTH * SPLIT)
        EVEN: tl.constexpr = K % (DEPTH * SPLIT) == 0
        if NORM:
            # The norm's weights are too few for a pipelined copy, so they are fetched a step ahead
            # by hand; once a row, for then they lie in registers as x does.
            norm_rows = norm + row[:, None] * 0
            at = (share * STEPS * DEPTH + depth)[None, :]
            ahead = tl.load(norm_rows + at, mask=at < K, other=0.0)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            at = ((share * STEPS + step) * DEPTH + depth)[None, :]
            fed = tl.load(
                x_rows + at, mask=live & (at < K), other=0.0, eviction_policy="evict_last"
            )
            if NORM:
                wide = fed.to(tl.float32)
                squares += wide * wide
                fed = (wide * (ahead.to(tl.float32) * SHRINK)).to(x.dtype.element_ty)
                ahead = tl.load(norm_rows + at + DEPTH, mask=at + DEPTH < K, other=0.0)
            streamed = _slab(first_rows, at, K, EVEN, "evict_first")
            first = tl.dot(fed, streamed.T, first, input_precision="ieee")
            if GATED:
                streamed = _slab(second_rows, at, K, EVEN, "evict_first")
                second = tl.dot(fed, streamed.T, second, input_precision="ieee")
        total = tl.sum(squares, axis=1)

        if SPLIT > 1:
            SUMS: tl.constexpr = ROWS * COLUMNS
            PART: tl.constexpr = (2 * SUMS if GATED else SUMS) + ROWS
            within = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            group = parts + tile.to(tl.int64) * SPLIT * PART
            mine = group + share * PART
            tl.store(mine + within, first)
            if GATED:
                tl.store(mine + SUMS + within, second)
            if NORM:
                tl.store(mine + PART - ROWS + row, total)
            tl.debug_barrier()  # every thread has written before one of them says so
            if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") < SPLIT - 1:
                return
            first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            for other in tl.static_range(SPLIT):
                part = group + other * PART
                first += tl.load(part + within, cache_modifier=".cg")
                if GATED:
                    second += tl.load(part + SUMS + within, cache_modifier=".cg")
                if NORM:
                    total += tl.load(part + PART - ROWS + row, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)

        if NORM:
            scale = tl.rsqrt(tl.where(row < m, total / K, 1.0) + eps) / SHRINK
            first = first * scale[:, None]
            second = second * scale[:, None]
        if BIAS:
            first += tl.load(bias + column, mask=column < width, other=0.0)[None, :]
            if GATED:
                second += tl.load(bias + width + column, mask=column < width, other=0.0)[None, :]
        result = _rounded(first, out)
        if GATED:
            gate = _rounded(result * tl.sigmoid(result), out)
            result = _rounded(gate * _rounded(second, out), out)
        inside = (row < m)[:, None] & (column < width)[None, :]
        if RESIDUAL:
            at = row[:, None] * residual_stride + column[None, :]
            result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * width + column[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
