"""A weight of few bits in the type that the vendor's products read, for many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.few_rows import PAIRS
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable
from domino_spec.quantization.scaled import ScaledWeight

_ROWS = 32
_COLUMNS = 128


def dequantized(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """[rows, columns], each (q - zero point) * scale in float32 and rounded once."""
    if not usable(weight.values):
        return weight.dequantize().to(dtype)
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    _dequantize[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))](
        weight.values,
        weight.scales,
        out,
        rows,
        columns,
        weight.values.stride(0),
        weight.scales.stride(0),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BITS=4 if weight.kind == "int4" else 8,
        SCALE_COLUMNS=weight.group,
        SCALE_ROWS=weight.row_block,
        PAIRS="" if weight.pairs is None else PAIRS[weight.pairs],
        num_warps=4,
        **overlap(out),
    )
    return out


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.few_rows import _scales_of
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _dequantize(
        values,
        scales,
        out,
        rows,
        columns,
        values_stride,
        scales_stride,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        BITS: tl.constexpr,
        SCALE_COLUMNS: tl.constexpr,
        SCALE_ROWS: tl.constexpr,
        PAIRS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one tile."""
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
        row = tl.minimum(row, rows - 1)
        column = tl.minimum(column, columns - 1)
        start = values + row.to(tl.int64) * values_stride
        # The product before may still read what this memory held before.
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        if BITS == 4:
            shared = tl.load(start + (column // 32 * 16 + column % 16))
            numbers = ((shared >> (column % 32 // 16 * 4).to(tl.uint8)) & 15).to(tl.float32)
        else:
            numbers = tl.load(start + column).to(tl.float32)
        scale, zero = _scales_of(
            scales, column // SCALE_COLUMNS, scales_stride, row, SCALE_ROWS, PAIRS
        )
        if PAIRS != "":
            numbers -= zero
        place = out + row.to(tl.int64) * columns + column
        tl.store(place, (numbers * scale).to(out.dtype.element_ty), mask=inside)
