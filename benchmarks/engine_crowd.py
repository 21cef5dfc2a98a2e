"""Rows that come, are read, decode and leave by chance, on this machine's device.

    python -m benchmarks.engine_crowd --crowds 20

Each row has parameters of its own (greedy or sampled, penalties, scores) and is read in chunks,
often behind a beginning that some slot holds already. Every token must be the one that the
reference loop writes for the row alone, in float32; on a GPU cycles are captured and started ahead.
The target is a table of bigrams disturbed by attention, so that a drafter who knows the table is
right most of the time and both accepted and refused drafts are common.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.decoding import RowStats
from domino_spec.drafter import Drafter
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, default_device
from tests.fast.crowd import Alone, Crowd
from tests.fast.runs import make_engine
from tests.support.families import randomise
from tests.support.pair import bigram_target, knowing_drafter, successor

SIZE, HEAD_DIM = 128, 32
DISTURBANCE = 0.05


def disturbed_pair(device: torch.device) -> tuple[Target, Drafter]:
    """A target that mostly follows a table, and a drafter that knows the table alone."""
    table = successor(SIZE)
    target = bigram_target(table)
    for layer in target.layers:
        randomise(layer.self_attn.o_proj, DISTURBANCE, seed=1)
        randomise(layer.mlp.down_proj, DISTURBANCE, seed=2)
    target.model.to(device)
    return target, knowing_drafter(shift=True, prefix=0, table=table, head_dim=HEAD_DIM).to(device)


def run_crowd(
    target: Target, drafter: Drafter, alone: Alone, seed: int, turns: int
) -> tuple[Crowd, AssertionError | None]:
    """One crowd, and what differs from its rows alone."""
    rng = random.Random(seed)
    engine = make_engine(target, drafter, slots=rng.randint(2, 6), reuse=True)
    crowd = Crowd(engine, rng, alone, scripted=False)
    try:
        crowd.run(turns)
        crowd.check()
        assert engine.free == engine.slots.count
    except AssertionError as error:
        return crowd, error
    return crowd, None


def measure(crowds: int, turns: int, device: torch.device) -> dict[str, Any]:
    """All crowds, counted."""
    target, drafter = disturbed_pair(device)
    alone = Alone(target)
    stats, counts = RowStats(), {"rows": 0, "left_early": 0, "began_behind_others": 0, "tokens": 0}
    differing = 0
    for seed in range(crowds):
        crowd, error = run_crowd(target, drafter, alone, seed, turns)
        if error is not None:
            differing += 1
            print(f"crowd {seed} differs: {error}", flush=True)
        counts["rows"] += len(crowd.rows)
        counts["left_early"] += len(crowd.gone)
        counts["began_behind_others"] += crowd.reused
        for row, _ in crowd.rows:
            counts["tokens"] += len(row.generated)
            stats.add(row.stats)
    return {
        "crowds": crowds,
        "turns": turns,
        **counts,
        "differing_crowds": differing,
        "tokens_per_cycle": stats.tokens_per_cycle,
        "device": device.type,
        "dtype": "float32",
        "captured": device.type == "cuda",
    }


def main() -> None:
    """One record; an error where a crowd differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crowds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("records/engine-crowd.jsonl"))
    options = parser.parse_args()
    start = time.perf_counter()
    found = measure(options.crowds, options.turns, default_device())
    append_record(options.out, found | {"environment": environment()})
    print(found, f"{time.perf_counter() - start:.0f} s", flush=True)
    if found["differing_crowds"]:
        raise SystemExit(f"{found['differing_crowds']} crowds differ; what differs is above.")


if __name__ == "__main__":
    main()
