"""A quantised weight: GGUF's blocks in the order in which a CPU multiplies them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.errors import CheckpointError
from domino_spec.quantization import reference
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.reference import BLOCK, FORMATS, KINDS, ROUNDS, Kind, Unpacked
from domino_spec.quantization.rows import gate_rows
from domino_spec.quantization.tiles import CHUNK, TILE, tiled, tiles_in_parts, tiles_of, untiled


class QuantizedWeight:
    """[rows, columns] in GGUF's blocks along a row, in tiles of sixteen rows."""

    def __init__(self, tiles: Tensor, kind: Kind, rows: int) -> None:
        self.tiles = tiles  # [tiles, size blocks, bytes] uint8
        self.kind = kind
        self.shape = (rows, tiles.shape[1] * FORMATS[kind].size)
        self.nbytes = tiles.numel()
        self.device = tiles.device

    @classmethod
    def from_blocks(cls, blocks: Tensor, kind: Kind) -> QuantizedWeight:
        """A GGUF file's own blocks [rows, size blocks, bytes]."""
        if kind not in KINDS:
            raise CheckpointError(
                f"found blocks of {kind}, expected {', '.join(KINDS)}: dequantise this weight"
            )
        form = FORMATS[kind]
        fits = blocks.dim() == 3 and blocks.shape[1] > 0 and blocks.shape[2] == form.bytes
        if blocks.dtype != torch.uint8 or not fits:
            raise CheckpointError(
                f"found {kind} blocks of {blocks.dtype} {list(blocks.shape)}, expected"
                f" torch.uint8 [rows, columns // {form.size}, {form.bytes}]"
            )
        if blocks.device.type != "cpu":
            raise CheckpointError(
                f"found {kind} blocks on {blocks.device}, expected the CPU: dequantise elsewhere"
            )
        return cls(tiles_of(blocks, kind), kind, len(blocks))

    @classmethod
    def quantize(cls, weight: Tensor, kind: Kind) -> QuantizedWeight:
        """A weight [rows, columns] rounded as llama.cpp's reference quantisers do."""
        if weight.dim() != 2 or weight.shape[1] % BLOCK:
            raise CheckpointError(
                f"found a weight of {list(weight.shape)}, expected [rows, columns] with columns a"
                f" multiple of {BLOCK}: leave this one as it is"
            )
        if kind not in ROUNDS:
            raise CheckpointError(f"found {kind}, expected one of {', '.join(ROUNDS)} to round to")
        some = max(CHUNK // 4 // max(weight.shape[1], 1), 1)  # floats are four times as wide
        parts = torch.split(weight.detach(), some)
        blocks = torch.cat([reference.quantize(part, kind) for part in parts])
        return cls.from_blocks(blocks, kind)

    def unpack(self, rows: Tensor | None = None) -> Unpacked:
        """In parts, of all rows or of some [...]."""
        if rows is None:
            return untiled(self.tiles, self.kind, rows=self.shape[0])
        parts = untiled(self.tiles[rows.flatten() // TILE], self.kind, lanes=rows.flatten() % TILE)
        return parts.each(lambda part: part.view(*rows.shape, *part.shape[1:]))

    def stored_bytes(self) -> Tensor:
        """All that is stored, as bytes."""
        return self.tiles.flatten()

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """Float32 [rows, columns], or [..., columns] of some rows [...]: an embedding's lookup."""
        compiled = kernel()
        if rows is not None and rows.numel():
            own = rows.numpy()  # whose least and greatest take a tenth of a tensor's time
            if not 0 <= own.min() <= own.max() < self.shape[0]:
                raise IndexError(f"found rows outside 0 .. {self.shape[0] - 1}, the weight's")
        if rows is None:
            values = torch.empty(self.shape, dtype=torch.float32, device=self.device)
            some = max(CHUNK // self.shape[1] // TILE, 1) * TILE  # what it takes besides is small
            for start in range(0, len(values), some):
                part = self[start : start + some].unpack()
                values[start : start + some] = reference.dequantize(part, self.kind)
            return values
        if compiled is None or rows.dtype is not torch.int64:
            return reference.dequantize(self.unpack(rows), self.kind)
        return compiled.rows(self.tiles, self.kind, rows)

    def linear(
        self,
        x: Tensor,  # [..., columns]
        bias: Tensor | None = None,  # [rows]
        *,
        norm: Tensor | None = None,  # [columns]
        eps: float = 0.0,
        residual: Tensor | None = None,  # like the result
        gated: bool = False,
    ) -> Tensor:
        """x @ weight.T + bias in x's type, of x rounded to 8 bits a block.

        With a `norm` x is RMS-normed by its weights before. A `residual` is added to the result.
        Of a `gated` product, whose rows are [gate; up], the result is silu(gate) * up.
        """
        if x.shape[-1] != self.shape[1] or x.device != self.device:
            raise ValueError(
                f"found x {list(x.shape)} on {x.device}, expected [..., {self.shape[1]}]"
                f" on {self.device}"
            )
        if bias is not None and bias.shape != self.shape[:1]:
            raise ValueError(f"found a bias {list(bias.shape)}, expected [{self.shape[0]}]")
        compiled = kernel()
        if compiled is not None:
            done = compiled.linear(
                self.tiles, self.kind, self.shape[0], x, bias, norm, eps, residual, gated
            )
            return done if x.dtype is torch.float32 else done.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).float()
        if norm is not None:
            rows = reference.rms_norm(rows, norm, eps)
        done = reference.linear(self.unpack(), self.kind, rows)
        if bias is not None:
            done += bias.float()
        done = done.view(*x.shape[:-1], self.shape[0])
        done = gate_rows(done) if gated else done
        return (done if residual is None else residual + done).to(x.dtype)

    def __getitem__(self, rows: Tensor | slice) -> QuantizedWeight:
        """Rows chosen, or in another order; none is rounded anew. Whole tiles are a view."""
        if isinstance(rows, slice):
            start, end, step = rows.indices(self.shape[0])
            if step == 1 and start % TILE == 0 and (end % TILE == 0 or end == self.shape[0]):
                tiles = self.tiles[start // TILE : -(-end // TILE)]
                return QuantizedWeight(tiles, self.kind, end - start)
            rows = torch.arange(start, end, step, device=self.device)
        chosen = rows
        tiles = tiles_in_parts(  # each row comes with its tile
            lambda some: self.unpack(chosen[some]), self.kind,
            rows=len(rows), count=self.tiles.shape[1], read=TILE,
        )  # fmt: skip
        return QuantizedWeight(tiles, self.kind, len(rows))

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of several, which are of one kind."""
        kinds = {part.kind for part in parts}
        if len(kinds) != 1:
            raise CheckpointError(
                f"found parts of {sorted(kinds)}, expected one kind: keep them as separate weights"
            )
        kind, rows = parts[0].kind, sum(part.shape[0] for part in parts)
        if all(part.shape[0] % TILE == 0 for part in parts[:-1]):
            return QuantizedWeight(torch.cat([part.tiles for part in parts]), kind, rows)
        unpacked = [part.unpack() for part in parts]
        columns = [torch.cat(each) for each in zip(*unpacked, strict=True) if each[0] is not None]
        whole = iter(columns)
        return QuantizedWeight(tiled(unpacked[0].each(lambda _: next(whole)), kind), kind, rows)

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.kind}, {self.shape[0]} x {self.shape[1]})"
