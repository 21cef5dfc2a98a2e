"""Kernels that come before the one ahead of them has gone (programmatic dependent launch).

On Hopper and later a launch may say that it need not wait for the one before. Its programs take
what room there is, read weights, which nobody writes, and only then wait for the results they need.
So the time between two launches is spent beside the kernel before. It pays for short kernels;
`few_rows`, which lives off the memory's whole speed, lost by it and stays out, also where it asked
for its first weights while it waited.

All that take part keep two rules. A program calls `wait_for_last` before it reads or writes
anything but weights; and all of them wait, so that what was written two launches ago is there too.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from domino_spec.fast.kernels.runtime import triton_available

SWITCH = "DOMINO_OVERLAP"
"""`off` launches kernels one after the other."""


def overlap(tensor: Tensor) -> dict[str, Any]:
    """What to launch a kernel with, so that it may overlap with its neighbours where that works."""
    device = tensor.device
    if device.type == "meta":  # compiled for a GPU that is not here
        there = _known()
    else:
        there = device.type == "cuda" and _known() and _hopper(device)
    if not there or os.environ.get(SWITCH) == "off":
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@cache
def _hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def _known() -> bool:
    """Whether this Triton can do it."""
    if not triton_available():
        return False
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401
    except ImportError:
        return False
    return True


if triton_available():
    import triton
    import triton.language as tl

    if _known():
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    @triton.jit
    def let_next_come(OVERLAP: tl.constexpr):
        """The next kernel's programs may take the room that this one's leave."""
        if OVERLAP:
            gdc_launch_dependents()

    @triton.jit
    def wait_for_last(OVERLAP: tl.constexpr):
        """From here on everything that kernels before this one wrote can be read."""
        if OVERLAP:
            gdc_wait()
