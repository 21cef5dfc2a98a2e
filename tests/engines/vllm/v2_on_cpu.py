"""vLLM's V2 model runner on a machine without a GPU, for tests only: call `install` before vLLM.

The runner's own kernels are Triton kernels and it orders its copies with CUDA streams. Here the
kernels run in Triton's interpreter, which is NumPy, and streams and events are objects that do
nothing: on a CPU every step is over when its call returns. vLLM itself is left as it is.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the stubs are
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TRITON_INTERPRET": "1",  # read when a kernel is decorated: before vLLM is imported
    "TRITON_DEFAULT_BACKEND": "cpu",
}


def install() -> None:
    """Set the environment and put every stub in place."""
    os.environ.update(ENVIRONMENT)
    _triton_backend()
    _comparisons()
    _log1p()
    _cuda_streams()
    _accelerator()


def _triton_backend() -> None:
    """A Triton backend named cpu: vLLM's CPU build takes Triton for usable only if there is one.

    It compiles nothing, since interpreted kernels never ask it to.
    """
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Compiler(BaseBackend):
        """Stands for the compiler of Triton's CPU branch."""

        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return target.backend == "cpu"

        def hash(self) -> str:
            return "interpreter"

        def parse_options(self, options: dict[str, Any]) -> object:
            return options

        def add_stages(self, *_: object) -> None:
            raise NotImplementedError("the interpreter compiles nothing")

        def load_dialects(self, context: object) -> None:
            pass

        def get_module_map(self) -> dict[str, ModuleType]:
            return {}

    class Driver(DriverBase):
        """Stands for its driver: one device, the CPU, with one stream."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is tuned in the interpreter")

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int) -> int:
            return 0

    backends["cpu"] = Backend(Compiler, Driver)


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


class _Order:
    """Stands for a CUDA stream or event: waiting for work that is already done."""

    def __init__(self, *_: object, **__: object) -> None:
        import torch

        self.device = torch.device("cpu")

    def query(self) -> bool:
        """All is done."""
        return True

    def elapsed_time(self, _end: object) -> float:
        """No time is taken."""
        return 0.0

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    record = wait = synchronize = wait_stream = wait_event = record_event = _nothing


def _cuda_streams() -> None:
    """Streams and events that order nothing; a stream is always the one current stream."""
    import torch

    current = _Order()
    torch.cuda.Stream = torch.cuda.Event = torch.Event = _Order  # type: ignore[misc, assignment]
    torch.cuda.stream = lambda _stream: nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: current  # type: ignore[assignment]
    torch.cuda.set_stream = lambda _stream: None  # type: ignore[assignment]


def _accelerator() -> None:
    """Calls to an accelerator that is not there."""
    import torch

    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.accelerator.empty_cache = lambda *_: None  # type: ignore[assignment]
