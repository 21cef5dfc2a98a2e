"""A `domino` command on a CPU, then its matrix products alone: what part of the time they take.

python -m benchmarks.products data answer target prompts.txt --out folder --json --quiet
"""

from __future__ import annotations

import io
import json
import sys
import time
from contextlib import redirect_stdout, suppress
from unittest import mock

import torch
from torch import Tensor

from domino_spec.cli.main import main as domino
from domino_spec.engine.kernels.packing import Packed

Product = tuple[Packed, int]
"""A packed matrix and the rows it was multiplied with."""


def main() -> None:
    """Print the command's own JSON, with seconds of the same products in the same order added.

    Seconds of CPUs too, from the first product on: on a machine with other work these say more.
    """
    done: list[Product] = []
    began = 0.0
    own = Packed.product

    def recorded(weight: Packed, x: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal began
        began = began or time.process_time()
        done.append((weight, len(x)))
        return own(weight, x, bias)

    told = io.StringIO()
    with (
        mock.patch.object(Packed, "product", recorded),
        redirect_stdout(told),
        suppress(SystemExit),
    ):
        domino()
    found = json.loads(told.getvalue())
    found["cpu_seconds"] = time.process_time() - began
    began = time.process_time()
    found["product_seconds"] = seconds_of(done)
    found["product_cpu_seconds"] = time.process_time() - began
    print(json.dumps(found))


@torch.no_grad()
def seconds_of(products: list[Product]) -> float:
    """Seconds of these products, on numbers of no meaning."""
    inputs = {
        (rows, weight.shape[1]): torch.randn(rows, weight.shape[1]) for weight, rows in products
    }
    began = time.perf_counter()
    for weight, rows in products:
        weight.product(inputs[rows, weight.shape[1]], None)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.argv[0] = "domino"
    main()
