"""GGUF's blocks of 32 numbers, and what a product with them is: the compiled kernel's reference.

A block is a float16 scale d (Q4_1: a minimum m too) and 32 numbers q of 4 or 8 bits, for the values
d * (q - 8) in Q4_0, d * q + m in Q4_1 and d * q in Q8_0. Four-bit numbers share bytes: the low
halves are the first sixteen, the high halves the others.

A product rounds every row of x to 8 bits a block, as llama.cpp does. Its numbers do not depend on
what is computed at the same time: a row has the same bits alone and among others.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["Q4_0", "Q4_1", "Q8_0"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCK = 32
BYTES: dict[Kind, int] = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}

_NOTHING = 2.0**-100
"""A block of x whose numbers are all smaller counts as zeros: 127 / them may not be a float."""
_ROWS = 4096
"""Rows of a weight that are unpacked at a time."""


def unpack(blocks: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor | None]:
    """Blocks [..., bytes] as int8 numbers [..., 32], scales [...] and, of Q4_1, minima [...]."""
    header = 4 if kind == "Q4_1" else 2
    floats = blocks[..., :header].contiguous().view(torch.float16).float()
    packed = blocks[..., header:]
    if kind == "Q8_0":
        return packed.contiguous().view(torch.int8), floats[..., 0], None
    numbers = torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8)
    if kind == "Q4_0":
        return numbers - 8, floats[..., 0], None
    return numbers, floats[..., 0], floats[..., 1]


def dequantize(blocks: Tensor, kind: Kind) -> Tensor:
    """Blocks [..., blocks, bytes] as float32 [..., columns]."""
    numbers, scale, minimum = unpack(blocks, kind)
    values = numbers.float() * scale.unsqueeze(-1)
    if minimum is not None:
        values += minimum.unsqueeze(-1)
    return values.flatten(-2)


def quantize(weight: Tensor, kind: Kind) -> Tensor:
    """Float32 [..., columns] as blocks [..., blocks, bytes], rounded as llama.cpp's reference."""
    values = weight.float().reshape(*weight.shape[:-1], weight.shape[-1] // BLOCK, BLOCK)
    if kind == "Q4_1":
        minimum = values.amin(-1, keepdim=True)
        scale = (values.amax(-1, keepdim=True) - minimum) / 15
        numbers = _halves(((values - minimum) * _inverse(scale) + 0.5).trunc())
        header = torch.cat([scale, minimum], dim=-1)
    elif kind == "Q4_0":
        # The number of largest size keeps its sign: it becomes -8. Of equals the first counts.
        size = values.abs()
        places = torch.arange(BLOCK, device=values.device)
        largest = size == size.amax(-1, keepdim=True)
        first = torch.where(largest, places, BLOCK - 1).amin(-1, keepdim=True)
        header = scale = values.gather(-1, first) / -8
        numbers = _halves((values * _inverse(scale) + 8.5).trunc())
    else:
        header = scale = values.abs().amax(-1, keepdim=True) / 127
        numbers = values * _inverse(scale)
        size = numbers.abs()  # half away from zero
        whole = size.floor() + (2 * (size - size.floor())).floor()
        numbers = (numbers.sign() * whole).to(torch.int8).view(torch.uint8)
    return torch.cat([header.half().view(torch.uint8), numbers], dim=-1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [m, columns] as whole numbers [m, blocks, 32] and scales [m, blocks], both float32.

    The scale is max|x| / 127, numbers are x * (127 / max|x|), halves rounded to even. A block with
    an infinite number or NaN has the scale NaN, and so are all results of its row.
    """
    values = x.float().reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    size = values.abs().amax(-1, keepdim=True)
    scale, inverse = size / 127, 127 / size
    zero, wrong = size < _NOTHING, ~size.isfinite()
    numbers = torch.where(zero | wrong, 0.0, (values * inverse).round())
    scale = torch.where(zero, 0.0, torch.where(wrong, torch.nan, scale))
    return numbers, scale.squeeze(-1)


def linear(blocks: Tensor, kind: Kind, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., columns] by blocks [rows, blocks, bytes]: float32 [..., rows].

    A block adds (d_w * d_x) * the sum of its integer products, which is exact, and in Q4_1 to that
    m * (d_x * the sum of x's integers). Blocks are added in their order, then the bias; every
    operation rounds to float32.
    """
    numbers, scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    lines = numbers.transpose(0, 1)  # [blocks, m, 32]
    parts = [
        _linear(lines, scale.T.unsqueeze(-1), *unpack(some, kind))
        for some in torch.split(blocks, _ROWS)
    ]
    done = torch.cat(parts, dim=1).view(*x.shape[:-1], len(blocks))
    return done if bias is None else done + bias.float()


def _linear(
    x: Tensor,  # [blocks, m, 32], whole numbers
    x_scale: Tensor,  # [blocks, m, 1]
    numbers: Tensor,  # [rows, blocks, 32]
    scale: Tensor,  # [rows, blocks]
    minimum: Tensor | None,  # [rows, blocks]
) -> Tensor:
    products = torch.bmm(x, numbers.float().permute(1, 2, 0))  # exact: whole, and under 2^24
    terms = (scale.T.unsqueeze(1) * x_scale) * products  # [blocks, m, rows]
    if minimum is not None:
        terms += minimum.T.unsqueeze(1) * (x_scale * x.sum(-1, keepdim=True))
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _halves(numbers: Tensor) -> Tensor:
    """Whole numbers [..., 32] of four bits, two to a byte."""
    low, high = numbers.clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4
