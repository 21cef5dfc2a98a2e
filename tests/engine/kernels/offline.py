"""Compiles kernels for GPUs that are not here, and reads what they will need there."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.forked import ask

ROOM = {arch: 1024 * kib for arch, kib in
        {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}  # fmt: skip
"""Shared memory a program may take, in bytes, by architecture (90: Hopper)."""


@dataclass(frozen=True)
class Case:
    """One compilation: arguments' types ("*bf16", "i32", "fp32") and constants, by name."""

    module: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()  # arguments that Triton will find divisible by 16
    warps: int = 4


@dataclass(frozen=True)
class Needs:
    """What ptxas made of it."""

    shared: int  # bytes
    registers: int  # a thread
    spills: int  # bytes of local memory a thread
    asm: dict[str, str] = field(default_factory=dict)


def needs(cases: Sequence[Case], *, arch: int = 90, asm: bool = False) -> list[Needs]:
    """Compile them all for one architecture."""
    found = ask(__name__, "compile_all", [asdict(case) for case in cases], arch, asm)
    return [Needs(**entry) for entry in found]


def _compile(case: Case, arch: int) -> Any:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(case.module), case.kernel)
    source = ASTSource(
        kernel,
        signature={**case.types, **dict.fromkeys(case.constants, "constexpr")},
        constexprs={(kernel.arg_names.index(name),): v for name, v in case.constants.items()},
        attrs={
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in case.types
            if case.types[name].startswith("*") or name in case.aligned
        },
    )
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": case.warps})


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {word: re.search(rf"{word}:(\d+)", text) for word in ("REG", "STACK", "LOCAL")}
    registers, stack, local = (int(match[1]) for match in found.values() if match is not None)
    return registers, stack + local


def compile_all(cases: list[dict[str, Any]], arch: int, with_asm: bool) -> list[dict[str, Any]]:
    """What each of them needs, in this process."""
    found = []
    for entry in cases:
        compiled = _compile(Case(**entry), arch)
        registers, spills = usage(compiled.asm["cubin"])
        asm = {key: compiled.asm[key] for key in ("ttgir", "ptx")} if with_asm else {}
        found.append(asdict(Needs(compiled.metadata.shared, registers, spills, asm)))
    return found
