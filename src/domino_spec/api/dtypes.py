"""The type a target is loaded in, where the caller leaves the choice to the machine."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from domino_spec.api.notices import DtypeNotice
from domino_spec.engine.dtypes import faster_on_cpu
from domino_spec.targets.load import DtypeRule

FASTEST = "fastest"
_HALF = (torch.bfloat16, torch.float16)

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
