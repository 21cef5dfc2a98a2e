"""Whether Triton's kernels can run here, or their twins must."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

from torch import Tensor

INTERPRET = "interpret"
SWITCH = "DOMINO_KERNELS"
"""`interpret` runs kernels on CPU tensors under TRITON_INTERPRET=1; `off` never runs them."""


@cache
def triton_available() -> bool:
    """Triton comes with PyTorch's CUDA builds; elsewhere it may be missing."""
    return importlib.util.find_spec("triton") is not None


def usable(tensor: Tensor) -> bool:
    """Whether a kernel may take this tensor."""
    wish = os.environ.get(SWITCH, "")
    if wish == "off" or not triton_available():
        return False
    if tensor.is_cuda:
        return True
    return wish == INTERPRET and os.environ.get("TRITON_INTERPRET") == "1"


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is the CPU's own business: lengths can be read and branched on."""
    return tensor.device.type == "cpu" and not usable(tensor)
