"""vLLM's V2 model runner on a machine without a GPU, for tests only: call `install` before vLLM.

vLLM's CPU worker has a V2 runner, and stand-ins for CUDA's streams and events, but the runner's own
kernels are written in Triton, which cannot compile for CPUs. Here they run in Triton's interpreter,
which is NumPy: slow and exact. The few stubs below are all it lacks; vLLM is left as it is.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.engine.kernels.interpreter import patch_and_check_less

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the stubs are
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",  # read when a kernel is decorated: before vLLM is imported
}


def install() -> None:
    """Set the environment and put every stub in place."""
    if "triton" in sys.modules:
        raise RuntimeError("Triton is imported already: its own functions were made to compile.")
    os.environ.update(ENVIRONMENT)
    _triton_backend()
    _comparisons()
    _log1p()
    patch_and_check_less()


def _triton_backend() -> None:
    """A Triton backend named cpu: vLLM's CPU build takes Triton for usable only if there is one.

    It is empty, since interpreted kernels are neither compiled nor launched by a driver.
    """
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    backends["cpu"] = Backend(BaseBackend, DriverBase)


def _comparisons() -> None:
    """Comparisons of scalars that give truth values: Triton 3.9 keeps the type of their operands.

    Masks made of them, as in the kernels that sample, are then numbers, which its stores refuse.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    binary_op = InterpreterBuilder.binary_op

    def typed(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        handle = binary_op(self, lhs, rhs, op)
        return TensorHandle(handle.data, tl.int1) if handle.data.dtype == bool else handle

    InterpreterBuilder.binary_op = typed


def _log1p() -> None:
    """The one function of CUDA's own library that the rejection sampler calls, in NumPy."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def log1p(value: Any) -> Any:
        with np.errstate(all="ignore"):  # what is not finite is never chosen
            result = np.log1p(value.handle.data)
        return tl.tensor(TensorHandle(result, value.handle.dtype), value.type)

    libdevice.log1p = log1p


def use_plain_top_p() -> None:
    """vLLM's own top-k and top-p in PyTorch, since the interpreter fails on the kernel's loops.

    Call it once vLLM is imported.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    assert topk_topp_sampler.HAS_TRITON
    topk_topp_sampler.HAS_TRITON = False
