"""What pages of the caches cost: plain steps and cycles with them and with one stretch a slot.

    python -m benchmarks.paged_caches qwen3-8b --at 1x512 --at 1x8192 --at 16x1024

Two engines of the same weights take turns, at so many rows and tokens of context. The kernels of
the one look up the page of each tile of keys; a page as long as a slot leaves the other's as they
are without pages.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from domino_spec.drafters import BlockDrafter
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.shapes import SHAPES, random_drafter, random_target
from domino_spec.records import append_record, environment
from domino_spec.targets import default_device


def measure(target: Any, drafter: Any, rows: int, context: int, turns: int) -> dict[str, Any]:
    """Seconds of each, all turns."""
    depth = drafter.depth
    capacity = context + 128 * (depth + 1)
    sizes = {"slots": rows, "capacity": capacity, "adaptive": False}
    paged = Engine(target, drafter, **sizes)
    slots = Engine(target, drafter, **sizes, page=capacity + paged.margin)
    assert paged.page is not None, "this machine keeps its caches in slots"
    assert paged.page < context
    plans = {"plain": Plan(0, alone=True), "cycle": Plan(depth)}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"pages": [], "slots": []} for name in plans
    }
    for turn in range(turns):
        for name, plan in plans.items():
            order = [("pages", paged), ("slots", slots)]
            for kind, engine in order if turn % 2 else reversed(order):
                spent = Bench(engine, context=context).cycle_seconds(rows, plan)
                seconds[name][kind].append(spent)
    return {
        "rows": rows,
        "context": context,
        "page": paged.page,
        "depth": depth,
        "seconds": seconds,
        "ratio": {
            name: statistics.median(own["pages"]) / statistics.median(own["slots"])
            for name, own in seconds.items()
        },
    }


def main() -> None:
    """One shape, a record for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--at", action="append", required=True, help="ROWSxCONTEXT, repeatable")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("records/paged-caches.jsonl"))
    arguments = parser.parse_args()
    device = default_device()
    target = random_target(arguments.shape, device=device, dtype=torch.bfloat16)
    drafter = BlockDrafter(random_drafter(target))
    for size in arguments.at:
        rows, context = (int(part) for part in size.split("x"))
        record = measure(target, drafter, rows, context, arguments.turns)
        record |= {"shape": arguments.shape, "environment": environment()}
        append_record(arguments.out, record)
        print(record["shape"], rows, context, record["ratio"], flush=True)


if __name__ == "__main__":
    main()
