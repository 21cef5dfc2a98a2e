"""Whether a compiled library gives the reference's numbers; `python -m` it with its path."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from domino_spec.quantization import reference
from domino_spec.quantization.compiled import FAILURES, Kernel
from domino_spec.quantization.reference import FORMATS, KINDS
from domino_spec.quantization.tiles import tiles_of


def check(found: Kernel) -> None:
    """A compiler, or a CPU, by which the kernel computes anything but the reference is refused."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)

    for kind in KINDS:
        form = FORMATS[kind]
        size = (18, 2, form.bytes)  # the last tile has room left
        blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device="cpu")
        scales = [-2] if kind == "Q6_K" else [0, 2][: 1 + form.minimum]
        for place in scales:  # finite ones, of a like size
            blocks[:, :, place], blocks[:, :, place + 1] = 0, 40
        x, parts, tiles = (
            draw(11, 2 * form.size),
            reference.unpack(blocks, kind),
            tiles_of(blocks, kind),
        )
        product = found.linear(tiles, kind, len(blocks), x, None, None, 0.0, None, False)
        rows = found.rows(tiles, kind, torch.arange(len(blocks), device="cpu"))
        alike = torch.equal(product, reference.linear(parts, kind, x))
        if not alike or not torch.equal(rows, reference.dequantize(parts, kind)):
            raise RuntimeError(f"the compiled kernel's {kind} is not the reference's")
    x, weight = draw(3, 50), draw(50)
    query, (keys, values) = draw(2, 4, 20), draw(2, 1, 2, 40, 20).unbind()
    seen = (
        torch.tensor([[0, 0, 17, 0, 0], [0, 3, 5, 0, 2]], device="cpu"),
        torch.tensor([9, 7], dtype=torch.int32, device="cpu"),
    )
    pairs = {
        "norm": (found.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        "activation": (found.silu(4 * x), reference.silu(4 * x)),
        "attention": (
            found.attend(query, keys, values, *seen, 0.3, 1),
            reference.attend(query, keys, values, *seen, 0.3),
        ),
    }
    for name, (made, expected) in pairs.items():
        if not torch.allclose(made, expected, rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"the compiled kernel's {name} is not the reference's")


if __name__ == "__main__":
    try:
        check(Kernel(Path(sys.argv[1])))
    except FAILURES as error:
        sys.exit(str(error))
