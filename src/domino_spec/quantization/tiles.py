"""How a quantised weight lies in memory: sixteen rows to a tile, as a CPU's vectors want them.

A tile holds, block by block, the scales of its rows, then their minima, then for each 32 numbers
the factors of the scales (where the kind has any) and the numbers: the first four of each row, the
next four ...; what 5 and 6 bits have over 4 comes last. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from domino_spec.quantization.reference import BLOCK, FORMATS, Kind, Unpacked, parted, unpack

TILE = 16
"""Rows that lie together."""
CHUNK = 1 << 18
"""Numbers of a weight that are put in order at a time: what that takes besides is a few MB."""


def tiles_of(blocks: Tensor, kind: Kind) -> Tensor:
    """A file's blocks [rows, size blocks, bytes] as tiles [tiles, size blocks, bytes]."""
    rows, count, _ = blocks.shape
    return tiles_in_parts(lambda some: unpack(blocks[some], kind), kind, rows=rows, count=count)


def tiles_in_parts(
    unpacked: Callable[[slice], Unpacked], kind: Kind, *, rows: int, count: int, read: int = 1
) -> Tensor:
    """Tiles of rows with `count` size blocks each, which are unpacked some at a time.

    For a row `read` times its own numbers are in memory then.
    """
    made = torch.empty(-(-rows // TILE), count, tile_bytes(kind), dtype=torch.uint8, device="cpu")
    some = max(CHUNK // (count * FORMATS[kind].size * read) // TILE, 1)
    for start in range(0, len(made), some):
        part = unpacked(slice(start * TILE, min((start + some) * TILE, rows)))
        made[start : start + some] = tiled(part, kind)
    return made


def tile_bytes(kind: Kind) -> int:
    """Of a tile's size block."""
    form = FORMATS[kind]
    header = 4 if form.minimum else 2
    factors = 2 if form.size > BLOCK else 0
    return TILE * (header + form.size // BLOCK * (factors + BLOCK * form.bits // 8))


def tiled(parts: Unpacked, kind: Kind) -> Tensor:
    """Parts [rows, ...] as tiles [tiles, size blocks, bytes], the last one filled up."""
    form, subs = FORMATS[kind], FORMATS[kind].size // BLOCK
    if missing := -len(parts.numbers) % TILE:
        parts = parts.each(lambda part: torch.cat([part, part.new_zeros(missing, *part.shape[1:])]))
    count = parts.scale.shape[1]

    def side_by_side(part: Tensor) -> Tensor:  # [rows, blocks] -> [tiles, blocks, 16]
        return parted(part, 0, (-1, TILE)).transpose(1, 2).contiguous()

    pieces = [side_by_side(parts.scale).view(torch.uint8)]
    if parts.minimum is not None:
        pieces.append(side_by_side(parts.minimum).view(torch.uint8))
    inner = []  # of 32 numbers, [tiles, size blocks, subs, bytes]
    if parts.factors is not None:
        factors = parted(parts.factors, 0, (-1, TILE)).permute(0, 2, 3, 1)  # [..., 2, 16]
        inner.append(parted(factors, 1, (count, subs)).flatten(-2))
    numbers = parts.numbers.view(-1, TILE, count, subs, 8, 4).permute(0, 2, 3, 4, 1, 5)
    if form.bits == 8:
        inner.append(numbers.flatten(-3))
    else:
        low, high = numbers[:, :, :, :4], numbers[:, :, :, 4:]
        inner.append((low & 15 | (high & 15) << 4).flatten(-3))
        width = form.bits - 4
        if width:
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=low.device).view(-1, 1, 1)
            rest = parted(numbers, 3, (width, -1)) >> 4  # [..., width, 8 / width, 16, 4]
            planes = (rest << places).sum(4, dtype=torch.uint8)
            inner.append(planes.flatten(-3))
    pieces.append(torch.cat(inner, dim=-1).flatten(-2))
    return torch.cat(pieces, dim=-1)


def untiled(
    tiles: Tensor, kind: Kind, *, rows: int | None = None, lanes: Tensor | None = None
) -> Unpacked:
    """The parts of all rows, or of one row, its lane, of each tile."""
    form, subs = FORMATS[kind], FORMATS[kind].size // BLOCK

    def apart(part: Tensor, axis: int) -> Tensor:  # the axis of sixteen rows comes first
        part = part.movedim(axis, 1)
        if lanes is not None:
            return part[torch.arange(len(part), device=part.device), lanes]
        return part.flatten(0, 1)[:rows]

    halves = tiles[..., : TILE * (4 if form.minimum else 2)].contiguous().view(torch.float16)
    scale = apart(halves[..., :TILE], 2)
    minimum = apart(halves[..., TILE:], 2) if form.minimum else None
    inner = parted(tiles[..., TILE * (4 if form.minimum else 2) :], -1, (subs, -1))
    factors = None
    if subs > 1:
        whole = parted(inner[..., : 2 * TILE], -1, (2, TILE))
        factors = apart(whole, 4).flatten(1, 2)  # [rows, blocks, 2]
        inner = inner[..., 2 * TILE :]
    if form.bits == 8:
        numbers = apart(parted(inner, -1, (8, TILE, 4)), 4)
    else:
        low = apart(parted(inner[..., : 16 * TILE], -1, (4, TILE, 4)), 4)
        numbers = torch.cat([low & 15, low >> 4], dim=-2)  # [rows, size blocks, subs, 8, 4]
        width = form.bits - 4
        if width:
            planes = apart(parted(inner[..., 16 * TILE :], -1, (width, 1, TILE, 4)), 5)
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=low.device).view(-1, 1)
            rest = planes >> places & (1 << width) - 1  # [..., width, 8 / width, 4]
            numbers = numbers | rest.flatten(-3, -2) << 4
    return Unpacked(numbers.flatten(-2).flatten(1, 2), scale, minimum, factors)
