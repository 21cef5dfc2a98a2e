"""Rows that come, are read, decode and leave by chance, on this machine's device.

    python -m benchmarks.engine_crowd --crowds 20 --drafters domino medusa eagle3 lookup

Each row has parameters of its own (greedy or sampled, penalties, scores) and is read in chunks,
often behind a beginning that some slot holds already. Every token must be the one that the
reference loop writes for the row alone, in float32; on a GPU cycles are captured and started ahead.
The target is a table of bigrams disturbed by attention, so that a drafter who knows the table is
right most of the time and both accepted and refused drafts are common. Every kind of drafter that
an engine runs has crowds of its own; for prompt lookup the table runs in rings.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.baselines.lean import BaselineSource
from domino_spec.baselines.lean_lookup import LookupSource
from domino_spec.decoding import RowStats
from domino_spec.engine.sources import AnySource
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, default_device
from tests.engine.crowd import Alone, Crowd
from tests.engine.runs import make_engine
from tests.support.baselines import knowing_eagle3, knowing_medusa
from tests.support.families import randomise
from tests.support.pair import bigram_target, knowing_drafter, successor

SIZE, HEAD_DIM = 128, 32
DISTURBANCE = 0.05
RING = 4
KINDS = ("domino", "medusa", "eagle3", "lookup")


def disturbed_target(table: Tensor, device: torch.device) -> Target:
    """It mostly follows a table."""
    target = bigram_target(table)
    for layer in target.layers:
        randomise(layer.self_attn.o_proj, DISTURBANCE, seed=1)
        randomise(layer.mlp.down_proj, DISTURBANCE, seed=2)
    target.model.to(device)
    return target


def make_source(kind: str, table: Tensor, device: torch.device) -> AnySource:
    """One that knows the table alone; lookup knows what the row has said."""
    if kind == "domino":
        return knowing_drafter(shift=True, prefix=0, table=table, head_dim=HEAD_DIM).to(device)
    if kind == "lookup":
        return LookupSource(depth=3, longest=2)
    known = knowing_medusa(table=table) if kind == "medusa" else knowing_eagle3(size=len(table))
    return BaselineSource(known.to(device))


def run_crowd(
    target: Target, drafter: AnySource, alone: Alone, seed: int, turns: int
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


def rings(size: int, length: int) -> Tensor:
    """Every token comes back after so many, for a drafter that looks up what was said."""
    places = torch.arange(size)
    return places - places % length + (places + 1) % length


def measure(kind: str, crowds: int, turns: int, device: torch.device) -> dict[str, Any]:
    """All crowds with a drafter of one kind, counted."""
    table = rings(SIZE, RING) if kind == "lookup" else successor(SIZE)
    target, drafter = disturbed_target(table, device), make_source(kind, table, device)
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
        "drafter": kind,
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
    """A record for every kind; an error where a crowd differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--crowds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--drafters", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("records/engine-crowd.jsonl"))
    options = parser.parse_args()
    differing = 0
    for kind in options.drafters:
        start = time.perf_counter()
        found = measure(kind, options.crowds, options.turns, default_device())
        append_record(options.out, found | {"environment": environment()})
        print(found, f"{time.perf_counter() - start:.0f} s", flush=True)
        differing += found["differing_crowds"]
    if differing:
        raise SystemExit(f"{differing} crowds differ; what differs is above.")


if __name__ == "__main__":
    main()
