"""GGUF's blocks, and what a forward over them computes: the compiled kernels' reference.

A block holds whole numbers of 4, 5, 6 or 8 bits for 32 or 256 values, and float16 scales. What a
kind's values are is said by `BlockFormat`; `unpack` reads them as llama.cpp writes them.

A product rounds every row of x to 8 bits a block of 32, as llama.cpp does. Its numbers do not
depend on what is computed at the same time: a row has the same bits alone and among others. Norms
and attention keep that promise too: quantised weights round what they read, and one bit may move a
number to the next level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCK = 32
"""Numbers of x that share a scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Values of a kind: scale * factor * (number - offset) + minimum."""

    bits: int
    """Of a number, which is stored without a sign."""
    offset: int
    bytes: int
    """Of a block in a GGUF file."""
    size: int = BLOCK
    """Numbers of a block."""
    minimum: bool = False
    """Whether a block has a minimum beside its scale."""


FORMATS: dict[Kind, BlockFormat] = {
    "Q4_0": BlockFormat(bits=4, offset=8, bytes=18),
    "Q4_1": BlockFormat(bits=4, offset=0, bytes=20, minimum=True),
    "Q5_0": BlockFormat(bits=5, offset=16, bytes=22),
    "Q5_1": BlockFormat(bits=5, offset=0, bytes=24, minimum=True),
    "Q8_0": BlockFormat(bits=8, offset=128, bytes=34),
    # Blocks of 256 have 8 scales and minima of 6 bits, or 16 scales of 8 bits.
    "Q4_K": BlockFormat(bits=4, offset=0, bytes=144, size=256, minimum=True),
    "Q5_K": BlockFormat(bits=5, offset=0, bytes=176, size=256, minimum=True),
    "Q6_K": BlockFormat(bits=6, offset=32, bytes=210, size=256),
}
ROUNDS: tuple[Kind, ...] = ("Q4_0", "Q4_1", "Q8_0")
"""Kinds to which `quantize` rounds."""

_NOTHING = 2.0**-100
"""A block of x whose numbers are all smaller counts as zeros: 127 / them may not be a float."""
_ROWS = 4096
"""Rows of a weight that are unpacked at a time."""


class Unpacked(NamedTuple):
    """Blocks in parts; a block of 256 numbers is eight of 32 here."""

    numbers: Tensor  # [..., blocks, 32] uint8
    scale: Tensor  # [..., size blocks] float16, of size numbers each
    minimum: Tensor | None  # the same of minima
    factors: Tensor | None  # [..., blocks, 2] uint8: of scale and minimum, or of half blocks (int8)

    def each(self, change: Callable[[Tensor], Tensor]) -> Unpacked:
        """Every part, changed."""
        return Unpacked(
            change(self.numbers),
            change(self.scale),
            None if self.minimum is None else change(self.minimum),
            None if self.factors is None else change(self.factors),
        )


def unpack(blocks: Tensor, kind: Kind) -> Unpacked:
    """A file's blocks [..., size blocks, bytes] in parts."""
    form = FORMATS[kind]
    if kind == "Q6_K":
        return _unpack_q6_k(blocks)
    floats = 4 if form.minimum else 2
    header = blocks[..., :floats].contiguous().view(torch.float16)
    scale, minimum = header[..., 0], header[..., 1] if form.minimum else None
    packed = blocks[..., floats:]
    if kind in ("Q4_K", "Q5_K"):
        factors = _six_bits(packed[..., :12])
        high, low = packed[..., 12:-128], packed[..., -128:]
        # 32 bytes hold 32 numbers in their low halves and the next 32 in their high ones.
        pairs = parted(low, -1, (4, BLOCK))
        numbers = torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(-3, -2)
        if form.bits == 5:  # bit i of a byte is the fifth of a number of block i
            bits = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
            numbers = numbers | (high.unsqueeze(-2) >> bits & 1) << 4
        return Unpacked(numbers.flatten(-3, -2), scale, minimum, factors.flatten(-3, -2))
    if form.bits == 8:
        return Unpacked(packed ^ 128, scale, None, None)
    low = packed[..., -16:]
    numbers = torch.cat([low & 15, low >> 4], dim=-1)
    if form.bits == 5:
        bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        numbers = numbers | (packed[..., :4].unsqueeze(-1) >> bits & 1).flatten(-2) << 4
    return Unpacked(numbers, scale, minimum, None)


def _six_bits(packed: Tensor) -> Tensor:
    """[..., 12] bytes of eight scales and eight minima: [..., 8, 2]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=-1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=-1)
    return torch.stack([scales, minima], dim=-1)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    low = parted(blocks[..., :128], -1, (2, 1, 2, BLOCK))
    high = parted(blocks[..., 128:192], -1, (2, 1, BLOCK))
    # Of each half low's first 32 bytes, its second, and both's high halves again.
    nibbles = torch.cat([low & 15, low >> 4], dim=-3)  # [..., 2, 2, 2, 32]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    numbers = nibbles.flatten(-3, -2) | (high >> shifts & 3) << 4  # [..., 2, 4, 32]
    return Unpacked(
        numbers.flatten(-3, -2).flatten(-3, -2),
        blocks[..., 208:].contiguous().view(torch.float16)[..., 0],
        None,
        parted(blocks[..., 192:208], -1, (8, 2)).flatten(-3, -2),
    )


def dequantize(parts: Unpacked, kind: Kind) -> Tensor:
    """Float32 [..., columns]."""
    form = FORMATS[kind]
    scale, minimum, factor = _scales(parts, kind)
    numbers = parts.numbers.float() - form.offset
    scale = scale.unsqueeze(-1)
    if factor is not None:  # of the two halves of a block
        scale = (scale * factor).repeat_interleave(BLOCK // 2, dim=-1)
    values = numbers * scale
    return (values if minimum is None else values + minimum.unsqueeze(-1)).flatten(-2)


def _scales(parts: Unpacked, kind: Kind) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scales and minima [..., blocks] and factors of half blocks [..., blocks, 2], in float32."""
    form = FORMATS[kind]
    scale = parts.scale.float().repeat_interleave(form.size // BLOCK, dim=-1)
    minimum = parts.minimum
    if minimum is not None:
        minimum = minimum.float().repeat_interleave(form.size // BLOCK, dim=-1)
    if parts.factors is None:
        return scale, minimum, None
    if minimum is None:
        return scale, None, parts.factors.view(torch.int8).float()
    factors = parts.factors.float()
    return scale * factors[..., 0], -(minimum * factors[..., 1]), None


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


def linear(parts: Unpacked, kind: Kind, x: Tensor) -> Tensor:
    """x [m, columns] by a weight's parts of [rows, ...]: float32 [m, rows].

    A block adds (scale_w * scale_x) * the sum of its integer products (each with the factor of its
    half block, if there are any), which is exact, and minimum_w * (scale_x * the sum of x's
    integers). Blocks are added in their order; every operation rounds to float32.
    """
    numbers, scale = quantize_rows(x)
    lines = numbers.transpose(0, 1)  # [blocks, m, 32]
    done = []
    for start in range(0, len(parts.numbers), _ROWS):
        some = parts.each(lambda part, start=start: part[start : start + _ROWS])  # type: ignore[misc]
        done.append(_linear(lines, scale.T.unsqueeze(-1), some, kind))
    return torch.cat(done, dim=1)


def _linear(
    x: Tensor,  # [blocks, m, 32], whole numbers
    x_scale: Tensor,  # [blocks, m, 1]
    parts: Unpacked,
    kind: Kind,
) -> Tensor:
    scale, minimum, factors = _scales(parts, kind)
    numbers = parts.numbers.float() - FORMATS[kind].offset  # [rows, blocks, 32]
    if factors is not None:
        numbers = numbers * factors.repeat_interleave(BLOCK // 2, dim=-1)
    products = torch.bmm(x, numbers.permute(1, 2, 0))  # exact: whole, and at most 2^24
    terms = (scale.T.unsqueeze(1) * x_scale) * products  # [blocks, m, rows]
    if minimum is not None:
        terms += minimum.T.unsqueeze(1) * (x_scale * x.sum(-1, keepdim=True))
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of [..., width] by its root mean square, times the weight [width]."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return F.silu(x)


def attend(
    query: Tensor,  # [tokens, heads, head_dim]
    keys: Tensor,  # [slots, kv heads, places, head_dim]
    values: Tensor,
    spans: Tensor,  # [tokens, 5]: slot, first, end, where its extras begin, how many
    extras: Tensor,  # [n]: more places, after those of the span
    scale: float,
) -> Tensor:
    """Attention of each token over the places that it sees: [tokens, heads * head_dim]."""
    mixed = query.new_empty(query.shape)
    for token, (slot, first, end, start, count) in enumerate(spans.tolist()):
        span = torch.arange(first, end, device=keys.device)
        places = torch.cat((span, extras[start : start + count].long()))
        mixed[token] = F.scaled_dot_product_attention(
            query[token].unsqueeze(1).unsqueeze(0),
            keys[slot][:, places].unsqueeze(0), values[slot][:, places].unsqueeze(0),
            scale=scale, enable_gqa=True,
        )[0, :, 0]  # fmt: skip
    return mixed.flatten(1)


def parted(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """An axis as several; one size may be -1."""
    found: Tensor = x.unflatten(axis, sizes)  # type: ignore[no-untyped-call]
    return found


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _halves(numbers: Tensor) -> Tensor:
    """Whole numbers [..., 32] of four bits, two to a byte."""
    low, high = numbers.clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4
