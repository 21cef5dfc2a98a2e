"""Which type of weights this machine's CPU multiplies faster: measured once, kept in a file."""

from __future__ import annotations

import time

import torch

from domino_spec.fast.kept import kept_file, processor, read_kept, seconds, write_kept
from domino_spec.fast.kernels.packing import packed, product

_TYPES = (torch.float32, torch.bfloat16)
_ROWS = (1, 8)
"""A plain step, and a block that is verified."""
_SIDE = 2048
_CALLS = 5


def faster_on_cpu() -> torch.dtype:
    """float32 or bfloat16, whichever takes less time for a plain step and a block together.

    A CPU without instructions for bfloat16 multiplies it many times slower; one that has them
    reads half the bytes.
    """
    spent = product_seconds()
    return min(_TYPES, key=lambda dtype: spent[dtype])


def product_seconds() -> dict[torch.dtype, float]:
    """Seconds of the products, from the file or measured now."""
    facts = [torch.__version__, processor(), torch.get_num_threads(), _SIDE, _ROWS]
    path = kept_file("dtypes", facts)
    kept = read_kept(path)
    try:
        return {dtype: seconds(kept[str(dtype)]) for dtype in _TYPES}
    except (KeyError, TypeError, ValueError):
        found = {dtype: measure_products(dtype) for dtype in _TYPES}
    write_kept(path, {str(dtype): spent for dtype, spent in found.items()})
    return found


@torch.no_grad()
def measure_products(dtype: torch.dtype) -> float:
    """Products of a few rows with one square matrix, packed where the engine would pack it."""
    weight = packed(torch.ones(_SIDE, _SIDE, dtype=dtype))
    total = 0.0
    for rows in _ROWS:
        x = torch.ones(rows, _SIDE, dtype=dtype)
        spent = []
        for _ in range(1 + _CALLS):  # the first one prepares what all others use
            start = time.perf_counter()
            product(x, weight, None)
            spent.append(time.perf_counter() - start)
        total += min(spent[1:])
    return total
