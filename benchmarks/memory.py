"""Peak memory of `domino generate` on a CPU, in fresh processes, plainly and with drafts.

    python -m benchmarks.memory FILE.gguf --draft lookup --without triton --out records/memory.jsonl

The first run of each has an empty cache folder: it also compiles kernels, converts the tokenizer
and, with drafts, measures costs. Packages of `--without` cannot be imported in these processes, as
where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_spec.records import append_record, environment

_COMMAND = """
import atexit, pathlib, runpy, sys

def report(into):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    pathlib.Path(into).write_text(peak)

_, into, without, *words = sys.argv
sys.modules.update(dict.fromkeys(filter(None, without.split(","))))
atexit.register(report, into)
sys.argv = ["domino", *words]
runpy.run_module("domino_spec", run_name="__main__")
"""


def peak_bytes(words: Sequence[str], *, without: Sequence[str] = (), cache: Path) -> int:
    """The most that a `domino` command holds in memory."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "peak"
        done = subprocess.run(
            [sys.executable, "-c", _COMMAND, str(into), ",".join(without), *words],
            env={**os.environ, "DOMINO_CACHE": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"`domino {' '.join(words)}` failed: {done.stderr[-2000:]}")
        return int(into.read_text()) * 1024


def main() -> None:
    """One record for plain decoding and one for each drafter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantize", default="keep")
    parser.add_argument("--draft", nargs="*", default=[])
    parser.add_argument("--prompt", default="Why is the sky blue?")
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    common = ["generate", str(args.target), "--quantize", args.quantize]
    common += ["-p", args.prompt, "-n", str(args.tokens)]
    for draft in (None, *args.draft):
        words = common if draft is None else [*common, "--draft", draft]
        with tempfile.TemporaryDirectory() as cache:
            first, *later = [
                peak_bytes(words, without=args.without, cache=Path(cache)) for _ in range(args.runs)
            ]
        found: dict[str, Any] = {
            "target": args.target.name, "quantize": args.quantize, "draft": draft,
            "new_tokens": args.tokens, "file_bytes": args.target.stat().st_size,
            "without": args.without, "first": first, "later": later,
        }  # fmt: skip
        print(json.dumps(found), flush=True)
        append_record(args.out, {**found, "environment": environment()})


if __name__ == "__main__":
    main()
