"""kernels.c, compiled at first use for this machine, kept in the cache folder, called by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from subprocess import SubprocessError

import torch
from torch import Tensor

from domino_spec.cache import cache_folder, processor
from domino_spec.errors import Notice
from domino_spec.quantization import reference
from domino_spec.quantization.reference import BLOCK, KINDS, Kind

SWITCH = "DOMINO_KERNELS"
"""`off`: PyTorch's operations instead. Read at first use."""
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC")
_GRAIN = 8192
"""Blocks times rows of x that are worth a further thread."""


class KernelNotice(Notice):
    """Quantised weights are multiplied by PyTorch's operations, which is slower."""


class Kernel:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._linear = ctypes.CDLL(str(path)).domino_linear
        self._linear.argtypes = (
            ctypes.c_int, pointer, size, size, pointer, size, pointer, pointer,
            ctypes.c_uint, pointer,
        )  # fmt: skip
        self._linear.restype = ctypes.c_int
        self._parallel = _openmp()

    def linear(self, blocks: Tensor, kind: Kind, x: Tensor, bias: Tensor | None) -> Tensor:
        """What `reference.linear` computes, to the last bit; a small layer's Python counts, too."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        if bias is not None:
            bias = bias.float().contiguous()
        rows, count, _ = blocks.shape
        out = x.new_empty(*x.shape[:-1], rows)
        m = x.numel() // (count * BLOCK)
        threads = min(torch.get_num_threads(), rows * count * m // _GRAIN)
        failed = self._linear(
            KINDS.index(kind), blocks.data_ptr(), rows, count, x.data_ptr(), m,
            None if bias is None else bias.data_ptr(), out.data_ptr(),
            max(threads, 1), self._parallel,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory to round {m} rows of {count * BLOCK} numbers: ask fewer")
        return out


@cache
def kernel() -> Kernel | None:
    """The kernel, compiled if need be; None, and a notice that says why, where it cannot run."""
    if os.environ.get(SWITCH) == "off":
        return None
    try:
        found = _load()
        _check(found)
    except (OSError, AttributeError, RuntimeError, ValueError, SubprocessError) as error:
        warnings.warn(
            f"quantised weights are multiplied by PyTorch's operations, which is slower: {error}",
            KernelNotice,
            stacklevel=2,
        )
        return None
    return found


def _load() -> Kernel:
    command = [*_compiler(), *_FLAGS, _native()]
    facts = (_SOURCE.read_text(encoding="utf-8"), command, _version(command[0]), _cpu())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    path = cache_folder() / "kernels" / f"quantization-{digest}.so"
    if path.exists():
        return Kernel(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError:  # a cache that cannot be written is no reason to stop
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name, path.name)
    with folder:
        made = Path(folder.name, "new.so")
        _run([*command, str(_SOURCE), "-o", str(made)])
        made.replace(path)  # whole, whoever else makes it at the same time
        return Kernel(path)


def _compiler() -> list[str]:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError("no C compiler (cc, gcc, clang) is on the PATH; install one, or set CC")


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, errors="replace"
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with {done.returncode}:"
            f" {said[0] if said else 'no output'}"
        )
    return done.stdout


def _cpu() -> list[str]:
    """What this CPU can do: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "CPU part", "CPU implementer")
    return [platform.platform(), processor(), *sorted({x for x in lines if x.startswith(names)})]


def _openmp() -> int | None:
    """The OpenMP that PyTorch itself runs: a second pool of threads would get in its way."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _check(found: Kernel) -> None:
    """A compiler, or a CPU, by which the kernel computes anything but the reference is refused."""
    generator = torch.Generator().manual_seed(0)
    for kind in KINDS:
        weight, x = torch.randn(18, 3 * BLOCK, generator=generator, device="cpu").tensor_split([7])
        blocks = reference.quantize(weight, kind)
        if not torch.equal(
            found.linear(blocks, kind, x, None), reference.linear(blocks, kind, x, None)
        ):
            raise RuntimeError(f"the compiled kernel's {kind} is not the reference's")
