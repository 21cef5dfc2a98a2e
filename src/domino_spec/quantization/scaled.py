"""Weights of 8 or 4 bits with scales, as AWQ, GPTQ and FP8 checkpoints hold them and GPUs read.

Weight-only: a value is (q - zero point) * scale, and the activations it is multiplied with are not
rounded. Scales are one a row (per channel), one a group of columns of a row, or one a block of rows
and columns. A product with few rows adds up x * q in float32 and scales the sums, so that no weight
is rounded; one with many rows multiplies weights rounded to the type of x, as the vendor's library
wants them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.errors import CheckpointError
from domino_spec.quantization.reference import BLOCK
from domino_spec.quantization.weight import QuantizedWeight

ScaledKind = Literal["int8", "int4", "fp8"]
SCALED_KINDS: tuple[ScaledKind, ...] = get_args(ScaledKind)
GROUPS = (128, 64, 32)
"""Columns that share a scale where weights are rounded to 4 bits: the first that fits."""
FEW = 192
"""Rows of x up to which no weight is rounded to the type of x. To write a weight out in half
precision and read that again costs what four or five readings of its own bytes cost, and three
tiles of 64 rows are three readings: a rule by reckoning."""

STORED = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": float(torch.finfo(torch.float8_e4m3fn).max)}


class ScaledWeight:
    """[rows, columns] of int8, packed int4 or float8 numbers, with their scales.

    Four-bit numbers are unsigned and share bytes as GGUF's do: of 32 columns the low halves are the
    first sixteen, the high halves the others. `scales` lie by group, then by row, so that
    neighbours in a product are neighbours in memory. Where there are zero points, a scale and its
    zero point are one word: `paired`.
    """

    def __init__(
        self,
        kind: ScaledKind,
        values: Tensor,  # [rows, columns], or [rows, columns // 2] of int4
        scales: Tensor,  # [groups, scale rows] float32, or int32 of `paired`
        *,
        group: int,
        row_block: int = 1,
        pairs: torch.dtype | None = None,
    ) -> None:
        rows = len(values)
        columns = values.shape[1] * (2 if kind == "int4" else 1)
        expected = (math.ceil(columns / group), math.ceil(rows / row_block))
        whole = values.dtype == STORED[kind] and tuple(scales.shape) == expected
        if not whole or scales.dtype != (torch.float32 if pairs is None else torch.int32):
            raise CheckpointError(
                f"found {kind} numbers of {values.dtype} {list(values.shape)} with scales of "
                f"{scales.dtype} {list(scales.shape)}, expected {STORED[kind]} and scales "
                f"{list(expected)}: this weight is not of the form that its checkpoint states"
            )
        if kind == "int4" and (columns % BLOCK or group % BLOCK):
            raise CheckpointError(
                f"found int4 numbers in groups of {group} of {columns} columns, expected multiples "
                f"of {BLOCK}: leave this weight as it is"
            )
        self.kind = kind
        self.values, self.scales = values.contiguous(), scales
        self.shape = (rows, columns)
        self.group = min(group, columns)
        self.row_block = row_block
        self.pairs = pairs
        """The type of scales that are paired with zero points; None: there are no zero points."""
        self.device = values.device
        self._joined: tuple[ScaledWeight, int] | None = None  # of what these are rows, from where

    @property
    def nbytes(self) -> int:
        """Of numbers, scales and zero points."""
        return self.values.nbytes + self.scales.numel() * self.scales.element_size()

    def stored_bytes(self) -> Tensor:
        """All that is stored, as bytes: numbers, then scales."""
        scales = self.scales.contiguous().view(torch.uint8).flatten()
        return torch.cat((self.values.view(torch.uint8).flatten(), scales))

    # Made from plain weights --------------------------------------------------------------------

    @classmethod
    def quantize(cls, weight: Tensor, kind: ScaledKind) -> ScaledWeight:
        """A weight [rows, columns] rounded to nearest: per channel, int4 in groups of columns."""
        wide = weight.detach().float()
        if kind == "int4":
            return cls._quantize_int4(wide)
        scale = (wide.abs().amax(1, keepdim=True) / _LARGEST[kind]).clamp(min=2.0**-100)
        numbers = (wide / scale).clamp(-_LARGEST[kind], _LARGEST[kind])
        values = numbers.round().to(torch.int8) if kind == "int8" else numbers.to(STORED[kind])
        return cls(kind, values, scale.T.contiguous(), group=wide.shape[1])

    @classmethod
    def _quantize_int4(cls, wide: Tensor) -> ScaledWeight:
        rows, columns = wide.shape
        group = next((size for size in GROUPS if columns % size == 0), None)
        if group is None:
            raise CheckpointError(
                f"found a weight of {list(wide.shape)}, expected columns in multiples of {BLOCK}, "
                "the least group of int4: leave this one as it is, or use int8"
            )
        grouped = wide.view(rows, -1, group)
        # The range holds 0, so that the zero point is one of the sixteen numbers.
        low = grouped.amin(-1, keepdim=True).clamp(max=0.0)
        high = grouped.amax(-1, keepdim=True).clamp(min=0.0)
        scale = ((high - low) / 15).clamp(min=2.0**-100).bfloat16()
        zero = (-low / scale.float()).round().clamp(0, 15)
        numbers = (grouped / scale.float() + zero).round().clamp(0, 15).to(torch.uint8)
        paired_up = paired(scale[..., 0].T, zero[..., 0].T)
        return cls(
            "int4", pack_int4(numbers.flatten(1)), paired_up, group=group, pairs=torch.bfloat16
        )

    # Read ---------------------------------------------------------------------------------------

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """Float32 [rows, columns], or [..., columns] of some rows [...]."""
        if rows is not None:
            return self[rows.flatten()].dequantize().view(*rows.shape, self.shape[1])
        scale, zero = self.unpaired()
        numbers = unpack_int4(self.values) if self.kind == "int4" else self.values
        wide = numbers.float()
        if zero is not None:
            wide -= self._spread(zero)
        return wide.mul_(self._spread(scale))

    def unpaired(self) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points, float32 [groups, scale rows]."""
        if self.pairs is None:
            return self.scales, None
        halves = self.scales.contiguous().view(torch.int16).view(*self.scales.shape, 2)
        return halves[..., 0].contiguous().view(self.pairs).float(), halves[..., 1].float()

    def _spread(self, each: Tensor) -> Tensor:
        """[groups, scale rows] for every number: [rows, columns], or [rows, 1]."""
        by_row = each.repeat_interleave(self.row_block, dim=1)[:, : self.shape[0]].T
        if by_row.shape[1] == 1:
            return by_row
        return by_row.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., columns] @ weight.T + bias in x's type: the kernels' reference."""
        if x.numel() > FEW * x.shape[-1] and x.dtype.itemsize < 4:
            return F.linear(x, self.dequantize().to(x.dtype), bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        added = None if bias is None else bias.to(wide)
        return F.linear(x.to(wide), self.dequantize().to(wide), added).to(x.dtype)

    # Rows ---------------------------------------------------------------------------------------

    def __getitem__(self, rows: Tensor | slice) -> ScaledWeight:
        """Rows chosen, or in another order; none is rounded anew."""
        chosen = self.values.view(torch.uint8)[rows].view(self.values.dtype)
        return self._with_rows(chosen, self.scales_by_row()[:, rows])

    def scales_by_row(self) -> Tensor:
        """A scale for every row, [groups, rows], also where rows share one."""
        if self.row_block == 1:
            return self.scales
        return self.scales.repeat_interleave(self.row_block, dim=1)[:, : self.shape[0]]

    def _with_rows(self, values: Tensor, scales: Tensor, *, row_block: int = 1) -> ScaledWeight:
        return ScaledWeight(
            self.kind, values, scales, group=self.group, row_block=row_block, pairs=self.pairs
        )

    @property
    def form(self) -> tuple[object, ...]:
        """What weights must have in common to be read as one."""
        return self.kind, self.shape[1], self.group, self.pairs, self.device

    @staticmethod
    def cat(parts: Sequence[ScaledWeight]) -> ScaledWeight:
        """The rows of several of one form, whose parts become views of them."""
        first = parts[0]
        forms = {part.form for part in parts}
        if len(forms) != 1:
            raise CheckpointError(
                f"found parts of {len(forms)} forms, expected one: keep them as separate weights"
            )
        if (whole := _joined_already(parts)) is not None:
            return whole
        blocks = {part.row_block for part in parts}
        aligned = all(part.shape[0] % part.row_block == 0 for part in parts)
        row_block = first.row_block if len(blocks) == 1 and aligned else 1
        scales = [p.scales if row_block == p.row_block else p.scales_by_row() for p in parts]
        joined = first._with_rows(
            torch.cat([part.values.view(torch.uint8) for part in parts]).view(first.values.dtype),
            torch.cat(scales, dim=1),
            row_block=row_block,
        )
        start = 0
        for part in parts:
            end = start + part.shape[0]
            part.values, part.row_block = joined.values[start:end], row_block
            part.scales = joined.scales[:, start // row_block : end // row_block]
            part._joined = (joined, start)
            start = end
        return joined

    def __repr__(self) -> str:
        return f"ScaledWeight({self.kind}, {self.shape[0]} x {self.shape[1]}, group={self.group})"

    # For a CPU ----------------------------------------------------------------------------------

    def to_blocks(self) -> QuantizedWeight:
        """As GGUF's blocks, whose kernels CPUs have.

        int4 becomes Q4_1, whose minimum -scale * zero point is rounded to float16; int8 without
        zero points Q8_0, its scale rounded to float16; anything else is rounded to Q8_0.
        """
        rows, columns = self.shape
        if columns % BLOCK or self.group % BLOCK or (self.kind == "int8" and self.pairs):
            return QuantizedWeight.quantize(self.dequantize(), "Q8_0")
        scale, zero = self.unpaired()
        header = scale.unsqueeze(-1)
        if self.kind == "int4":
            assert zero is not None
            header = torch.stack((scale, -scale * zero), dim=-1)
        elif self.kind == "fp8":
            return QuantizedWeight.quantize(self.dequantize(), "Q8_0")
        by_block = header.half().transpose(0, 1)  # [rows, groups, 1 or 2]
        by_block = by_block.repeat_interleave(self.group // BLOCK, dim=1)[:, : columns // BLOCK]
        numbers = self.values.view(torch.uint8).view(rows, columns // BLOCK, -1)
        blocks = torch.cat((by_block.contiguous().view(torch.uint8), numbers), dim=-1)
        kind: Literal["Q4_1", "Q8_0"] = "Q4_1" if self.kind == "int4" else "Q8_0"
        return QuantizedWeight.from_blocks(blocks, kind)


def _joined_already(parts: Sequence[ScaledWeight]) -> ScaledWeight | None:
    """What these are all rows of, one part after the other: an earlier engine's work."""
    if parts[0]._joined is None:
        return None
    whole, end = parts[0]._joined[0], 0
    for part in parts:
        if part._joined is None or part._joined[0] is not whole or part._joined[1] != end:
            return None
        end += part.shape[0]
    return whole if end == whole.shape[0] else None


def paired(scales: Tensor, zeros: Tensor) -> Tensor:
    """Half-precision scales and whole zero points of one shape as words: the zero point above."""
    halves = torch.stack((scales.contiguous().view(torch.int16), zeros.to(torch.int16)), dim=-1)
    return halves.contiguous().view(torch.int32).squeeze(-1)


def pack_int4(numbers: Tensor) -> Tensor:
    """Numbers of four bits, uint8 [..., columns], two to a byte: [..., columns // 2]."""
    low, high = numbers.reshape(*numbers.shape[:-1], -1, 2, BLOCK // 2).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_int4(packed: Tensor) -> Tensor:
    """Undoes `pack_int4`."""
    halves = packed.reshape(*packed.shape[:-1], -1, BLOCK // 2)
    return torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)
