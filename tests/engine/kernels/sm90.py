"""Compiles what launchers launch for GPUs that are not here, and says what it takes there.

Launchers are called as in production, with tensors that have shapes but no memory, and Triton is
told that the GPU at hand is an sm_90, or another: it specialises and compiles each launch as there,
and does not run it.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from domino_spec.engine.kernels import runtime
from tests.engine.kernels.offline import ROOM, usage
from tests.support.forked import ask

Found = dict[str, dict[str, int]]
"""{kernel: {shared, registers, spills, launches}}"""


def launched(module: str, *functions: str, arch: int = 90) -> dict[str, Found]:
    """What each of a module's functions launches."""
    found: dict[str, Found] = ask(__name__, "report", module, functions, arch)
    return found


def assert_fits(found: Found, *, arch: int = 90) -> None:
    """No kernel takes more shared memory than there is, or spills its registers."""
    for name, needs in found.items():
        assert needs["shared"] <= ROOM[arch], (name, needs)
        assert needs["spills"] == 0, (name, needs)


class Driver:
    """Stands in for the GPU's driver as far as compiling asks for it."""

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def _compiling(arch: int) -> Iterator[list[Any]]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Driver(arch))
    runtime.absent = runtime.Gpu(divmod(arch, 10), ROOM[arch])
    compiled: list[Any] = []

    def launch(self: Any, _grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            compiled.append(self.run(*args, grid=None, warmup=True, **kwargs))

        return run

    JITFunction.__getitem__ = launch
    yield compiled


def _needs(kernel: Any) -> dict[str, int]:
    registers, spills = usage(kernel.asm["cubin"])
    return {
        "shared": kernel.metadata.shared,
        "registers": registers,
        "spills": spills,
        "warps": kernel.metadata.num_warps,
    }


def report(module: str, functions: list[str], arch: int) -> dict[str, Found]:
    """What they launch, in this process."""
    found = {}
    with _compiling(arch) as compiled:
        for function in functions:
            getattr(importlib.import_module(module), function)()
            found[function] = _worst(compiled)
            compiled.clear()
    return found


def _worst(compiled: list[Any]) -> Found:
    """Of each kernel."""
    found: Found = {}
    for kernel in compiled:
        name = kernel.metadata.name
        needs = _needs(kernel)
        worst = found.setdefault(name, {**needs, "launches": 0})
        worst.update({key: max(worst[key], value) for key, value in needs.items()})
        worst["launches"] += 1
    return found
