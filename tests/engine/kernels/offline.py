"""Compiles kernels for the H200 where there is none, and reads what they will need there.

In a process of its own: where TRITON_INTERPRET is set, kernels cannot be compiled at all.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOM = 227 * 1024
"""Shared memory a program may take on Hopper, in bytes."""


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


def needs(cases: Sequence[Case], *, asm: bool = False) -> list[Needs]:
    """Compile them all for sm_90."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, __file__, *(["--asm"] if asm else [])],
        input=json.dumps([asdict(case) for case in cases]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Needs(**entry) for entry in json.loads(done.stdout)]


def _compile(case: Case) -> Any:
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
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": case.warps})


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


def main() -> None:
    """Cases on stdin, needs on stdout."""
    found = []
    for entry in json.load(sys.stdin):
        compiled = _compile(Case(**entry))
        registers, spills = usage(compiled.asm["cubin"])
        asm = {key: compiled.asm[key] for key in ("ttgir", "ptx")} if "--asm" in sys.argv else {}
        found.append(asdict(Needs(compiled.metadata.shared, registers, spills, asm)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
