"""Kernels that come before the one ahead of them has gone (programmatic dependent launch).

On Hopper and later a launch may say that it need not wait for the one before. Its programs take
what room there is, read weights (never written) and only then wait for the results they need.
So the time between two launches overlaps with the kernel before.

When the next kernel is let in decides what that is worth. One that lives off the memory's whole
speed lost more than it gained where it came while many programs were at work (we think that its own
then gather on those processors which had room, and stay there). So what comes before such a kernel
lets it in when its own programs are about to go; what comes before others does so at once.

All that take part keep two rules. A program calls `wait_for_last` before it reads or writes
anything but weights; and all of them wait, so that what was written two launches ago is there too.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from domino_spec.engine.kernels.runtime import gpu, triton_available

SWITCH = "DOMINO_OVERLAP"
"""`off` launches kernels one after the other."""


def overlap(tensor: Tensor) -> dict[str, Any]:
    """What to launch a kernel with, so that it may overlap with its neighbours where that works."""
    device = tensor.device
    there = device.type in ("cuda", "meta") and torch.version.hip is None and _known()
    if not there or gpu(device).capability < (9, 0) or os.environ.get(SWITCH) == "off":
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


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
    def ask_for(rows, start, K: tl.constexpr, COUNT: tl.constexpr, ASKS: tl.constexpr):
        """Have COUNT numbers of rows [n, 1] of a weight brought into the second-level cache.

        Nothing waits for them and no result depends on it.
        """
        if ASKS:
            LINE: tl.constexpr = 128 // (rows.dtype.element_ty.primitive_bitwidth // 8)
            line = tl.minimum(start + tl.arange(0, COUNT // LINE) * LINE, K - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [(rows + line[None, :]).to(tl.int64, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def wait_for_last(OVERLAP: tl.constexpr):
        """From here on everything that kernels before this one wrote can be read."""
        if OVERLAP:
            gdc_wait()
