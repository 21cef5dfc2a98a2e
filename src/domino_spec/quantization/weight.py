"""A quantised weight: GGUF's blocks, and the products with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.errors import CheckpointError
from domino_spec.quantization import reference
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.reference import BLOCK, BYTES, KINDS, Kind


class QuantizedWeight:
    """[rows, columns] in blocks of 32 numbers along a row, as GGUF stores them."""

    def __init__(self, blocks: Tensor, kind: Kind) -> None:
        if kind not in KINDS:
            raise CheckpointError(
                f"found blocks of {kind}, expected {', '.join(KINDS)}: dequantise this weight"
            )
        form = blocks.dim() == 3 and blocks.shape[1] > 0 and blocks.shape[2] == BYTES[kind]
        if blocks.dtype != torch.uint8 or not form:
            raise CheckpointError(
                f"found {kind} blocks of {blocks.dtype} {list(blocks.shape)}, expected"
                f" torch.uint8 [rows, columns // {BLOCK}, {BYTES[kind]}]"
            )
        if blocks.device.type != "cpu":
            raise CheckpointError(
                f"found {kind} blocks on {blocks.device}, expected the CPU: dequantise elsewhere"
            )
        self.blocks = blocks.contiguous()
        self.kind = kind
        self.shape = (blocks.shape[0], blocks.shape[1] * BLOCK)
        self.nbytes = blocks.numel()
        self.device = blocks.device

    @classmethod
    def quantize(cls, weight: Tensor, kind: Kind) -> QuantizedWeight:
        """A weight [rows, columns] rounded as llama.cpp's reference quantisers do."""
        if weight.dim() != 2 or weight.shape[1] % BLOCK:
            raise CheckpointError(
                f"found a weight of {list(weight.shape)}, expected [rows, columns] with columns a"
                f" multiple of {BLOCK}: leave this one as it is"
            )
        return cls(reference.quantize(weight.detach(), kind), kind)

    def stored_bytes(self) -> Tensor:
        """All that is stored, as bytes."""
        return self.blocks.flatten()

    def dequantize(self, rows: Tensor | None = None) -> Tensor:
        """Float32 [rows, columns], or [..., columns] of some rows [...]: an embedding's lookup."""
        return reference.dequantize(self.blocks if rows is None else self.blocks[rows], self.kind)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., columns] @ weight.T + bias in x's type, of x rounded to 8 bits a block."""
        if x.shape[-1] != self.shape[1] or x.device != self.device:
            raise ValueError(
                f"found x {list(x.shape)} on {x.device}, expected [..., {self.shape[1]}]"
                f" on {self.device}"
            )
        if bias is not None and bias.shape != self.shape[:1]:
            raise ValueError(f"found a bias {list(bias.shape)}, expected [{self.shape[0]}]")
        compiled = kernel()
        linear = reference.linear if compiled is None else compiled.linear
        done = linear(self.blocks, self.kind, x, bias)
        return done if x.dtype is torch.float32 else done.to(x.dtype)

    def __getitem__(self, rows: Tensor | slice) -> QuantizedWeight:
        """Rows chosen, or in another order; none is rounded anew."""
        return QuantizedWeight(self.blocks[rows], self.kind)

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of several, which are of one kind."""
        kinds = {part.kind for part in parts}
        if len(kinds) != 1:
            raise CheckpointError(
                f"found parts of {sorted(kinds)}, expected one kind: keep them as separate weights"
            )
        return QuantizedWeight(torch.cat([part.blocks for part in parts]), parts[0].kind)

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.kind}, {self.shape[0]} x {self.shape[1]})"
