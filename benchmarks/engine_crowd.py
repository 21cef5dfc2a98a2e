"""Randomised stress tests on this machine's device: random arrivals and aborts.

    python -m benchmarks.engine_crowd --crowds 20 --drafters domino medusa eagle3 lookup

Each sequence has parameters of its own (greedy or sampled, penalties, scores, with drafts or
without), and often begins with a prefix that the caches hold already. Every token must be the one
that the reference loop gives the sequence alone, in float32; on a GPU cycles are captured and
started ahead. The target is a table of bigrams disturbed by attention, so that a drafter that knows
the table is right most of the time: drafts are accepted and rejected. Every kind of drafter has
tests of its own; for prompt lookup the table runs in rings.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.decoding import AcceptanceStats, Drafter
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, default_device
from tests.engine.runs import make_engine
from tests.engine.stress import Alone, StressTest, disturbed_target, drafter_for, table_for

SIZE, HEAD_DIM = 128, 32
KINDS = ("domino", "medusa", "eagle3", "lookup")


def make_drafter(kind: str, device: torch.device) -> Drafter:
    """A drafter that knows the target's table, on the device."""
    drafter = drafter_for(kind, table_for(kind, SIZE), head_dim=HEAD_DIM)
    if drafter.model is not None:
        drafter.model.to(device)
    return drafter


def run_test(
    target: Target, drafter: Drafter, alone: Alone, seed: int, turns: int
) -> tuple[StressTest, AssertionError | None]:
    """One stress test, and what differs from its sequences alone."""
    rng = random.Random(seed)
    chunk = rng.choice([1, 7, 2048])
    engine = make_engine(target, drafter, slots=rng.randint(2, 6), reuse=True, chunk=chunk)
    test = StressTest(engine, rng, alone)
    try:
        test.run(turns)
        test.check()
    except AssertionError as error:
        return test, error
    return test, None


def measure(kind: str, crowds: int, turns: int, device: torch.device) -> dict[str, Any]:
    """All stress tests with a drafter of one kind, counted."""
    target = disturbed_target(table_for(kind, SIZE))
    target.model.to(device)
    drafter, alone = make_drafter(kind, device), Alone(target)
    stats, counts = (
        AcceptanceStats(),
        {"rows": 0, "left_early": 0, "began_behind_others": 0, "tokens": 0},
    )
    differing = 0
    for seed in range(crowds):
        test, error = run_test(target, drafter, alone, seed, turns)
        if error is not None:
            differing += 1
            print(f"stress test {seed} differs: {error}", flush=True)
        counts["rows"] += len(test.sequences)
        counts["left_early"] += len(test.aborted)
        counts["began_behind_others"] += test.reused
        for sequence in test.sequences:
            counts["tokens"] += len(sequence.output)
            if sequence.speculate:
                stats.add(sequence.stats)
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
    """A record for every kind; an error where a stress test differs."""
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
        raise SystemExit(f"{differing} stress tests differ; what differs is above.")


if __name__ == "__main__":
    main()
