"""The engine against the memory's floor: stages, floors, batches, forced acceptance.

python -m benchmarks.engine_speed qwen3-8b --candidates 32 --tokens-per-cycle 7.17 4.2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.fast.engine import Engine
from domino_spec.fast.measure import Bench, accepted_pattern, bandwidth, expected, geometric
from domino_spec.fast.policy import depths
from domino_spec.fast.shapes import SHAPES, random_drafter, random_target
from domino_spec.records import append_record, environment
from domino_spec.targets import default_device

DEPTH = 15


def main() -> None:
    """One shape, one record."""
    options = _options()
    device = default_device()
    began = time.perf_counter()
    target = random_target(options.shape, device=device, dtype=getattr(torch, options.dtype))
    engine = Engine(
        target,
        random_drafter(target),
        slots=max(options.batch),
        capacity=options.context + 2048,
        candidates=options.candidates,
    )
    bench = Bench(engine, context=options.context)
    built = time.perf_counter() - began
    speed = bandwidth(device)
    print(f"bandwidth {speed / 1e12:.2f} TB/s; built in {built:.1f} s")
    record: dict[str, Any] = {
        "shape": options.shape,
        "dtype": options.dtype,
        "candidates": options.candidates,
        "context": options.context,
        "bandwidth": speed,
        "build_seconds": built,
        **alone(bench, speed, began),
        "batches": batches(bench, options, began),
        "paced": paced(bench, options) if options.paced else [],
    }
    if torch.cuda.is_available():
        record["peak_memory"] = torch.cuda.max_memory_allocated()
        print(f"peak memory {record['peak_memory'] / 2**30:.1f} GiB")
    append_record(options.out, record | {"environment": environment()})


def alone(bench: Bench, speed: float, began: float) -> dict[str, Any]:
    """One row: plain steps, cycles and their stages, each with its floor."""
    found: dict[str, Any] = {}
    for name, depth in (("cycle", DEPTH), ("plain", 0)):
        seconds = bench.cycle_seconds(1, depth)
        size = bench.floor_bytes(1, drafts=bool(depth))
        found[name] = {"seconds": seconds, "bytes": size, "over_floor": seconds * speed / size}
        found.setdefault("first_cycle_seconds", time.perf_counter() - began)
        print(f"{name}: {seconds * 1e3:.3f} ms, {seconds * speed / size:.3f} times its floor")
    found["stages"] = [vars(stage) for stage in bench.stages(1, DEPTH)]
    for stage in found["stages"]:
        over = stage["seconds"] * speed / stage["bytes"]
        print(f"  {stage['name']:26} {stage['seconds'] * 1e3:7.3f} ms  {over:5.2f} times its floor")
    return found


def batches(bench: Bench, options: argparse.Namespace, began: float) -> list[dict[str, Any]]:
    """Seconds a cycle by rows and depth, and what the best depth gains."""
    found = []
    for batch in options.batch:
        if time.perf_counter() - began > options.limit:
            break
        spent = {depth: bench.cycle_seconds(batch, depth) for depth in depths(DEPTH)}
        found.append({"batch": batch, "seconds": spent})
        line = f"batch {batch:3}: plain {batch / spent[0]:8.0f} tokens/s"
        for wanted in options.tokens_per_cycle:
            chance = geometric(wanted, DEPTH)
            gains = {depth: expected(chance, depth) / spent[depth] * spent[0] for depth in spent}
            best = max(gains, key=lambda depth: gains[depth])
            line += f"  {wanted}: {gains[best]:.2f}x at {best} ({gains[DEPTH]:.2f}x at {DEPTH})"
        print(line, flush=True)
    return found


def paced(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The engine's own loop, host and all."""
    found = []
    for batch in sorted({1, max(options.batch)}):
        slow = bench.paced(batch, 0, [0], cycles=128)
        for wanted in options.tokens_per_cycle:
            pattern = accepted_pattern(geometric(wanted, DEPTH), DEPTH)
            pace = bench.paced(batch, DEPTH, pattern, cycles=64)
            found.append({"batch": batch, "wanted": wanted, "pace": pace, "plain": slow})
            print(f"loop, batch {batch}, {wanted}: {pace:.0f} tokens/s, {pace / slow:.2f}x plain")
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens-per-cycle", type=float, nargs="+", default=[7.17, 4.2])
    parser.add_argument("--paced", action="store_true", help="also the engine's own loop")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for the batches")
    parser.add_argument("--out", type=Path, default=Path("records/engine.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
