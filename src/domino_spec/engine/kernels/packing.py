"""Weights in the order in which a CPU's matrix product wants them, so that no call reorders them.

For a handful of rows a BLAS spends more time reordering the weights than multiplying. oneDNN can do
that once, beforehand; PyTorch's compiler does the same when it freezes a model. A packed copy is
held in addition to the model's own weights; where those are pages of a file, as safetensors maps
them, the pages are given back until something reads them again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels.dequantize import dequantized
from domino_spec.quantization import QuantizedWeight, ScaledWeight

SMALL = 1 << 16
"""Elements of a weight that is not worth packing: a packed product costs 40 us before it begins,
a plain one of 256 x 256 with 8 rows takes 20 us in all (float32, Xeon)."""


class Packed:
    """One matrix [N, K], packed."""

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.device = weight.device
        self.nbytes = weight.numel() * weight.element_size()
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""
        done: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return done


class Parts:
    """Matrices of several kinds that are read together, the rows of one after another."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.nbytes = sum(part.nbytes for part in parts)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias."""
        done = torch.cat([product(x, part, None) for part in self.parts], dim=-1)
        return done if bias is None else done + bias


Matrix = Tensor | QuantizedWeight | ScaledWeight
"""A module's own weight."""


@dataclass(frozen=True)
class ScaledEmbedding:
    """An embedding whose rows are read times a factor, as the first layer sees them."""

    weight: Matrix  # [vocabulary, hidden]
    scale: float


Table = Matrix | ScaledEmbedding
"""A matrix whose rows are looked up: an embedding."""
Weight = Tensor | Packed | QuantizedWeight | ScaledWeight | Parts
_PAGEOUT = 21  # MADV_PAGEOUT; Python has no name for it


def page_out(weight: Tensor) -> None:
    """Give back the memory of a weight that is a file's; advice, on Linux, and never a loss."""
    if weight.device.type != "cpu" or sys.platform != "linux" or not weight.is_contiguous():
        return
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_PAGEOUT)
            )


def packed(weight: Weight) -> Weight:
    """Packed where this machine can and it pays, the weight itself elsewhere."""
    if not isinstance(weight, Tensor):
        return weight
    if weight.device.type != "cpu" or weight.numel() <= SMALL:
        return weight
    return Packed(weight) if can_pack(weight.dtype) else weight


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, whatever form the weight has."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, QuantizedWeight):
        return weight.linear(x, bias)
    if isinstance(weight, ScaledWeight):
        return F.linear(x, dequantized(weight, x.dtype), bias)
    return weight.product(x, bias)


def look_up(table: Table, rows: Tensor) -> Tensor:
    """Rows of a table, [..., columns]."""
    if isinstance(table, ScaledEmbedding):
        return look_up(table.weight, rows) * table.scale
    return F.embedding(rows, table) if isinstance(table, Tensor) else table.dequantize(rows)


def plain_rows(table: Table) -> tuple[Tensor, float] | None:
    """What a kernel reads a table's rows from, and their factor; None where they are quantised."""
    weight, scale = (
        (table.weight, table.scale) if isinstance(table, ScaledEmbedding) else (table, 1.0)
    )
    return (weight, scale) if isinstance(weight, Tensor) else None


_able: dict[torch.dtype, bool] = {}


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch packs this type here, and multiplies correctly then."""
    if dtype not in _able:
        _able[dtype] = _try(dtype)
    return _able[dtype]


def _try(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    try:
        found = Packed(weight)
        for rows in (1, 3, 16):
            x = torch.randn(rows, 32, generator=generator).to(dtype)
            torch.testing.assert_close(
                found.product(x, None).float(), F.linear(x.float(), weight.float()),
                rtol=0.03, atol=0.1 if dtype != torch.float32 else 1e-4,
            )  # fmt: skip
    except (RuntimeError, AttributeError, AssertionError):  # no such operation here, or a wrong one
        return False
    return True
