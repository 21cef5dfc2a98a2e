"""The type a target is loaded in, where the caller leaves the choice to the machine."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch

from domino_spec.api.notices import DtypeNotice
from domino_spec.cache import (
    measurement_file,
    processor,
    read_measurement,
    seconds,
    write_measurement,
)
from domino_spec.engine.kernels.packing import packed, product
from domino_spec.engine.measure import least_seconds
from domino_spec.targets.load import DtypeRule

FASTEST = "fastest"
_HALF = (torch.bfloat16, torch.float16)
_TYPES = (torch.float32, torch.bfloat16)
_ROWS = (1, 8)
"""A plain step, and a block that is verified."""
_SIDE = 2048
_ROUNDS = 8

DtypeChoice = torch.dtype | str | None
"""A type, its name, `auto` (the checkpoint's own), `fastest`, or None for the loader's default."""


def dtype_rule(dtype: DtypeChoice) -> torch.dtype | str | DtypeRule | None:
    """As the loader takes it."""
    return fastest_dtype if dtype == FASTEST else dtype


def fastest_dtype(config: Any, device: torch.device) -> torch.dtype:
    """On a CPU what it multiplies faster; elsewhere the checkpoint's own half precision."""
    own = _own_dtype(config)
    if device.type != "cpu":
        return own if own in _HALF else torch.bfloat16
    found = faster_on_cpu()
    if found in _HALF and own == torch.float32:
        warnings.warn(
            "bfloat16 is fastest on this CPU and the checkpoint is float32: its weights are "
            "rounded, so that answers may differ from float32's.",
            DtypeNotice,
            stacklevel=2,
        )
    return found


def _own_dtype(config: Any) -> torch.dtype | None:
    stated = getattr(config.get_text_config(), "dtype", None)
    found = getattr(torch, stated, None) if isinstance(stated, str) else stated
    return found if isinstance(found, torch.dtype) else None


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
    """Products of a few rows with one square matrix, packed where the engine would pack it."""
    weights = {dtype: packed(torch.ones(_SIDE, _SIDE, dtype=dtype)) for dtype in _TYPES}
    calls = {
        (dtype, rows): partial(product, torch.ones(rows, _SIDE, dtype=dtype), weight, None)
        for dtype, weight in weights.items()
        for rows in _ROWS
    }
    fast = torch.backends.mkldnn.enabled
    least, _ = least_seconds(calls, most=_ROUNDS)
    # PyTorch gives its fast products up, float32's too, once one of bfloat16 cannot be had.
    torch.backends.mkldnn.enabled = fast
    return {dtype: sum(least[dtype, rows] for rows in _ROWS) for dtype in _TYPES}
