"""`domino bench engine` where the command line's packages are missing, as on some GPU machines.

python -m benchmarks.engine_speed qwen3-8b --candidates 32 --rows 1 2 4 8 16 32
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from domino_spec.bench.engine_report import measure_engine
from domino_spec.bench.settings import EngineSettings
from domino_spec.engine.shapes import SHAPES
from domino_spec.quantization import SCALED_KINDS
from domino_spec.records import append_record, environment


def main() -> None:
    """One shape, one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", choices=SCALED_KINDS)
    parser.add_argument("--context", type=int)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--tokens-per-cycle", type=float, nargs="+")
    parser.add_argument("--no-reference", dest="reference", action="store_false", default=None)
    parser.add_argument("--out", type=Path, default=Path("records/engine.jsonl"))
    given = {name: v for name, v in vars(parser.parse_args()).items() if v is not None}
    out = given.pop("out")
    settings = EngineSettings(**given)
    record = measure_engine(settings, lambda text: print(text, flush=True))
    append_record(out, record | {"environment": environment()})
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
