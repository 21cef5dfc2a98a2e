"""Which type of weights this machine's CPU multiplies faster: measured once, kept in a file."""

from __future__ import annotations

import math
import time

import torch

from domino_spec.cache import (
    measurement_file,
    processor,
    read_measurement,
    seconds,
    write_measurement,
)
from domino_spec.engine.kernels.packing import packed, product

_TYPES = (torch.float32, torch.bfloat16)
_ROWS = (1, 8)
"""A plain step, and a block that is verified."""
_SIDE = 2048
_ROUNDS = 8


def faster_on_cpu() -> torch.dtype:
    """float32 or bfloat16, whichever takes less time for a plain step and a block together.

    bfloat16 is half the bytes, but a CPU without instructions for it has to emulate it.
    """
    spent = product_seconds()
    return min(_TYPES, key=lambda dtype: spent[dtype])


def product_seconds() -> dict[torch.dtype, float]:
    """Seconds of the products, from the file or measured now."""
    facts = [torch.__version__, processor(), torch.get_num_threads(), _SIDE, _ROWS]
    path = measurement_file("dtypes", facts)
    kept = read_measurement(path)
    try:
        return {dtype: seconds(kept[str(dtype)]) for dtype in _TYPES}
    except (KeyError, TypeError, ValueError):
        found = measure_products()
    write_measurement(path, {str(dtype): spent for dtype, spent in found.items()})
    return found


@torch.no_grad()
def measure_products() -> dict[torch.dtype, float]:
    """Products of a few rows with one square matrix, packed where the engine would pack it.

    The least of a few rounds: other work on the machine only ever adds.
    """
    weights = {dtype: packed(torch.ones(_SIDE, _SIDE, dtype=dtype)) for dtype in _TYPES}
    inputs = {(dtype, n): torch.ones(n, _SIDE, dtype=dtype) for dtype in _TYPES for n in _ROWS}
    least = dict.fromkeys(inputs, math.inf)
    for turn in range(1 + _ROUNDS):
        for (dtype, rows), x in inputs.items():
            start = time.perf_counter()
            product(x, weights[dtype], None)
            if turn:  # the first round prepares what all others use
                least[dtype, rows] = min(least[dtype, rows], time.perf_counter() - start)
    return {dtype: sum(least[dtype, rows] for rows in _ROWS) for dtype in _TYPES}
