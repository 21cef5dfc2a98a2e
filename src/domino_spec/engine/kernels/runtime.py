"""Whether Triton's kernels can run here, or their reference implementations must; which GPU."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

INTERPRET = "interpret"
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton too asks once, at import
SWITCH = "DOMINO_KERNELS"
"""`interpret` runs kernels on CPU tensors under TRITON_INTERPRET=1; `off` never runs them."""


@dataclass(frozen=True)
class Gpu:
    """What the sizes of a kernel's tiles depend on."""

    capability: tuple[int, int]
    shared_memory: int  # bytes, of one program


absent = Gpu((9, 0), 227 << 10)
"""What kernels are compiled for when tensors have no memory: an H200."""


def gpu(device: torch.device) -> Gpu:
    """That of a device; of the CPU, which interprets kernels, and of meta: `absent`."""
    return _here(device) if device.type == "cuda" else absent


@cache
def _here(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    most = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Gpu((found.major, found.minor), most)


@cache
def triton_available() -> bool:
    """Triton comes with PyTorch's CUDA builds; elsewhere it may be missing."""
    return importlib.util.find_spec("triton") is not None


def usable(tensor: Tensor) -> bool:
    """Whether a kernel may take this tensor."""
    if not tensor.is_cuda and not _INTERPRETED:  # every operation on a CPU asks
        return False
    wish = os.environ.get(SWITCH, "")
    if wish == "off" or not triton_available():
        return False
    if tensor.is_cuda:
        return True
    return wish == INTERPRET


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches and captures go to the current GPU: inside, that is this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is the CPU's own business: lengths can be read and branched on."""
    return tensor.device.type == "cpu" and not usable(tensor)
