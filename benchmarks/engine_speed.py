"""`domino bench engine` where the command line's packages are missing, as on some GPU machines.

python -m benchmarks.engine_speed qwen3-8b --candidates 32 --rows 1 2 4 8 16 32
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from domino_spec.bench.engine_report import Request, measure_engine
from domino_spec.engine.shapes import SHAPES
from domino_spec.records import append_record, environment
from domino_spec.targets import default_device


def main() -> None:
    """One shape, one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens-per-cycle", type=float, nargs="+", default=[7.17, 4.2])
    parser.add_argument("--no-reference", action="store_true", help="not the Transformers loop")
    parser.add_argument("--out", type=Path, default=Path("records/engine.jsonl"))
    options = parser.parse_args()
    request = Request(
        shape=options.shape,
        dtype=getattr(torch, options.dtype),
        device=default_device(),
        context=options.context,
        candidates=options.candidates,
        batches=tuple(options.rows),
        tokens_per_cycle=tuple(options.tokens_per_cycle),
        reference=not options.no_reference,
    )
    record = measure_engine(request, lambda text: print(text, flush=True))
    append_record(options.out, record | {"environment": environment()})
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
