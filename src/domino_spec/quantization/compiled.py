"""kernels.c, compiled at first use for this machine, kept in the cache folder, called by ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from domino_spec.cache import cache_folder, processor
from domino_spec.quantization.reference import BLOCK, FORMATS, KINDS, Kind

SWITCH = "DOMINO_KERNELS"
"""`off`: targets are unpacked to float32 instead. Read at first use."""
_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-psabi")
FAILURES = (OSError, AttributeError, RuntimeError, ValueError, SubprocessError)
_finding = threading.Lock()
_GRAIN = 8192
"""Blocks times rows of x that are worth a further thread."""


def address(x: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Where C reads or writes it; what it would take for something else is refused."""
    if x is None:
        return None
    if x.dtype is not dtype or not x.is_cpu:
        raise TypeError(f"found {x.dtype} on {x.device}, expected {dtype} on the CPU")
    return x.data_ptr()


class Kernel:
    """The compiled library, called with as little of Python's time as a small layer allows."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_float
        threads = (ctypes.c_uint, pointer)
        self._linear, self._norm = library.domino_linear, library.domino_norm
        self._silu, self._rotate = library.domino_silu, library.domino_rotate
        self._attend = library.domino_attend
        self._linear.argtypes = (
            ctypes.c_int, pointer, size, size, pointer, size, pointer, number, pointer, pointer,
            ctypes.c_int, pointer, *threads,
        )  # fmt: skip
        self._norm.argtypes = (pointer, size, size, pointer, number, pointer)
        self._silu.argtypes = (pointer, size, pointer)
        self._rotate.argtypes = (
            pointer, size, size, size, size, pointer, pointer, number, pointer, pointer, pointer,
            size, pointer, pointer, pointer,
        )  # fmt: skip
        self._attend.argtypes = (
            pointer, pointer, pointer, size, size, size, size, size, size, pointer, pointer,
            number, pointer, *threads,
        )  # fmt: skip
        self._linear.restype = self._attend.restype = ctypes.c_int
        self._norm.restype = self._silu.restype = self._rotate.restype = None
        self._rows = library.domino_rows
        self._rows.argtypes = (ctypes.c_int, pointer, size, pointer, size, pointer)
        self._rows.restype = None
        self._forward = library.domino_forward
        self._forward.argtypes = (pointer, pointer, *threads, pointer)
        self._draft = library.domino_draft
        self._draft.argtypes = (pointer, pointer, size, size, pointer, pointer, *threads, pointer)
        self._store = library.domino_store
        self._store.argtypes = (
            pointer, pointer, size, pointer, pointer, pointer, pointer, pointer, size, size,
            *threads, pointer,
        )  # fmt: skip
        for each in (self._forward, self._draft, self._store):
            each.restype = ctypes.c_int
        library.domino_instructions.restype = ctypes.c_char_p
        self.instructions: str = library.domino_instructions().decode()
        self._parallel, self._team_size = _openmp()

    def linear(
        self,
        tiles: Tensor,
        kind: Kind,
        rows: int,
        x: Tensor,
        bias: Tensor | None,
        norm: Tensor | None,
        eps: float,
        residual: Tensor | None,
        gated: bool,
    ) -> Tensor:
        """What `QuantizedWeight.linear` is without it; products to the last bit."""
        blocks = tiles.shape[1] * FORMATS[kind].size // BLOCK
        x = _plain(x)
        width = rows // 2 if gated else rows
        out = x.new_empty(*x.shape[:-1], width)
        m = x.numel() // (blocks * BLOCK)
        threads = min(threads_here(), rows * blocks * m // _GRAIN)
        norm, bias, residual = (_plain_or_none(each) for each in (norm, bias, residual))
        failed = self._linear(
            KINDS.index(kind), address(tiles, torch.uint8), rows, blocks, address(x), m,
            address(norm), eps, address(bias), address(residual), gated, address(out),
            max(threads, 1), self._parallel,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory to round {m} rows of {blocks * BLOCK} numbers: ask fewer")
        return out

    def rows(self, tiles: Tensor, kind: Kind, rows: Tensor) -> Tensor:
        """Float32 [..., columns] of some rows [...], to the last bit."""
        form = FORMATS[kind]
        rows = rows.contiguous()
        columns = tiles.shape[1] * form.size
        out = torch.empty(*rows.shape, columns, dtype=torch.float32, device=rows.device)
        self._rows(
            KINDS.index(kind), address(tiles, torch.uint8), columns // BLOCK,
            address(rows, torch.int64), rows.numel(), address(out),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of [..., width]."""
        x, weight, width = _plain(x), _plain(weight), x.shape[-1]
        out = torch.empty_like(x)
        self._norm(address(x), x.numel() // width, width, address(weight), eps, address(out))
        return out

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        x = _plain(x)
        out = torch.empty_like(x)
        self._silu(address(x), x.numel(), address(out))
        return out

    def rotate(
        self,
        qkv: Tensor,  # [tokens, (heads + 2 * kv heads) * head_dim]
        cache: tuple[Tensor, Tensor],  # [slots, kv heads, capacity, head_dim]
        rotary: tuple[Tensor, Tensor],  # [positions, head_dim]
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        places: Tensor,  # [tokens, 3]
    ) -> Tensor:
        """Rotated queries [tokens, heads, head_dim]; keys and values are in the cache then."""
        keys, values = cache
        _, kv_heads, capacity, size = keys.shape
        tokens = len(qkv)
        heads = qkv.shape[1] // size - 2 * kv_heads
        query = qkv.new_empty(tokens, heads, size)
        self._rotate(
            address(qkv), tokens, heads, kv_heads, size, *map(address, norms), eps,
            *map(address, rotary), address(places, torch.int64), capacity,
            address(query), address(keys), address(values),
        )  # fmt: skip
        return query

    def attend(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        keys: Tensor,  # [slots, kv heads, places, head_dim], each head's places one after another
        values: Tensor,
        spans: Tensor,  # [tokens, 5] int64
        extras: Tensor,  # [n] int32
        scale: float,
        threads: int,
    ) -> Tensor:
        """What `reference.attend` computes, within rounding: [tokens, heads * head_dim]."""
        tokens, heads, size = query.shape
        out = query.new_empty(tokens, heads * size)
        failed = self._attend(
            address(query), address(keys), address(values), keys.stride(0), keys.stride(1),
            tokens, heads, keys.shape[1], size, address(spans, torch.int64),
            address(extras, torch.int32), scale, address(out), threads, self._parallel,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the scores of attention: ask for fewer tokens")
        return out

    def forward(
        self, layers: ctypes.Array[Any], stack: ctypes.Structure, *, tokens: int, blocks: int
    ) -> None:
        """All layers of a model, of so many blocks each, over these tokens, as `Stack` says."""
        threads = max(min(threads_here(), tokens * blocks // _GRAIN), 1)
        address, shape = ctypes.addressof(layers), ctypes.addressof(stack)
        if self._forward(address, shape, threads, self._parallel, self._team_size):
            raise MemoryError(f"no memory for a forward of {tokens} tokens: ask for fewer")

    def draft(
        self,
        head: Any,  # a reference to the structure
        hidden: Tensor,  # [batch, depth, hidden]
        anchors: Tensor,  # [batch]
        drafts: Tensor,  # [batch, depth]: what is written
        *,
        blocks: int,
    ) -> None:
        """All drafts of a rollout, as `DraftRollout` says; `blocks` are those of its lm_head."""
        batch, depth, _ = hidden.shape
        threads = max(min(threads_here(), batch * depth * blocks // _GRAIN), 1)
        failed = self._draft(
            head, address(hidden), batch, depth, address(anchors, torch.int64),
            address(drafts, torch.int64), threads, self._parallel, self._team_size,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {depth} drafts of {batch} sequences: ask for fewer")

    def store(
        self,
        context: Any,  # a reference to the structure
        captured: Tensor,  # [tokens, captured]
        cache: tuple[Tensor, Tensor],  # [layers, slots, kv heads, capacity, head_dim]
        rotary: tuple[Tensor, Tensor],  # [positions, head_dim]
        places: Tensor,  # [tokens, 3]
        *,
        blocks: int,
    ) -> None:
        """A drafter's context, as `DraftContext` says."""
        tokens, (keys, values) = len(captured), cache
        threads = max(min(threads_here(), tokens * blocks // _GRAIN), 1)
        failed = self._store(
            context, address(captured), tokens, *map(address, rotary),
            address(places, torch.int64), address(keys), address(values), keys.shape[3],
            keys.stride(0), threads, self._parallel, self._team_size,
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the drafter's {tokens} tokens: ask for fewer")


def threads_here() -> int:
    """PyTorch's threads, and no more than there are processors: a thread waits for all others."""
    return min(torch.get_num_threads(), _processors())


@cache
def _processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(min(found, math.ceil(int(quota) / int(period))), 1)
    except (OSError, ValueError):  # no such group, or "max"
        return found


def _plain(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()


def _plain_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _plain(x)


@cache
def kernel() -> Kernel | None:
    """The kernel, compiled if need be; None where it cannot run."""
    found = _find()
    return found if isinstance(found, Kernel) else None


def unsupported_reason() -> str | None:
    """Why the kernel cannot run here; None if it can."""
    found = _find()
    return found if isinstance(found, str) else None


def can_run() -> bool:
    """Whether `kernel` has what it needs, a compiled library or a compiler; nothing is compiled."""
    if os.environ.get(SWITCH) == "off":
        return False
    try:
        return _cached().exists() or bool(_compiler())
    except FAILURES:
        return False


def compile_ahead() -> None:
    """Begin on another thread, while a target's files are read; `kernel` waits for the rest."""
    threading.Thread(target=_find, name="compile", daemon=True).start()


def _find() -> Kernel | str:
    with _finding:
        return _found()


@cache
def _found() -> Kernel | str:
    """The kernel, or why there is none: what was tried once is not tried again."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH} is off"
    try:
        return _load()
    except FAILURES as error:
        return str(error)


def _load() -> Kernel:
    """From the cache, which holds checked libraries alone; else compiled and checked."""
    path = _cached()
    with suppress(OSError, AttributeError):  # none, or of another C library
        if _is_ours(path.parent) and _is_ours(path):
            return Kernel(path)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _is_ours(path.parent):
            raise PermissionError(path.parent)
        folder = tempfile.TemporaryDirectory(dir=path.parent)
    except OSError:  # a cache that cannot be written, or by others too: this process compiles
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        path = Path(folder.name, path.name)
    with folder:
        made = Path(folder.name, "new.so")
        _compile(made)
        _check(made)
        made.chmod(0o755)
        made.replace(path)  # whole, whoever else makes it at the same time
        return Kernel(path)


def _cached() -> Path:
    """Of this source and this CPU, whatever compiled it: the compiler may be gone by now."""
    facts = (_SOURCE.read_text(encoding="utf-8"), _FLAGS, _native(), _cpu())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return cache_folder() / "kernels" / f"quantization-{digest}.so"


def _is_ours(path: Path) -> bool:
    """Whether others than this user and root could not have written it, where POSIX tells."""
    if not hasattr(os, "getuid"):
        return True
    found = path.stat()
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022


def _compile(made: Path) -> None:
    _run([*_compiler(), *_FLAGS, _native(), str(_SOURCE), "-o", str(made), "-lm"])


def _check(made: Path) -> None:
    """In a process of its own, which wrong instructions may end."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    _run(
        [sys.executable or "python3", "-m", "domino_spec.quantization.check", str(made)],
        cwd=made.parent, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def _compiler() -> list[str]:
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise RuntimeError("no C compiler (cc, gcc, clang) is on the PATH; install one, or set CC")


def _native() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def _run(command: list[str], **options: Any) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, errors="replace",
        **options,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with {done.returncode}:"
            f" {said[0] if said else 'no output'}"
        )


def _cpu() -> list[str]:
    """What this CPU can do: a cache folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "CPU part", "CPU implementer")
    system = [platform.system(), platform.machine(), *platform.libc_ver()]
    return [*system, processor(), *sorted({x for x in lines if x.startswith(names)})]


def _openmp() -> tuple[int | None, int | None]:
    """The OpenMP that PyTorch itself runs: a second pool of threads would get in its way."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = (library.GOMP_parallel, library.omp_get_num_threads)
        first, second = (ctypes.cast(each, ctypes.c_void_p).value for each in functions)
    except (OSError, AttributeError):
        return None, None
    return first, second
