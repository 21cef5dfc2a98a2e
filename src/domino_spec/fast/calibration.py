"""What cycles cost on this machine: measured once, kept in a file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from domino_spec import __version__
from domino_spec.errors import InputError
from domino_spec.fast.cycle import Plan
from domino_spec.fast.engine import Engine
from domino_spec.fast.kept import kept_file, processor, read_kept, seconds, write_kept
from domino_spec.fast.kernels import overlap, runtime
from domino_spec.fast.measure import Bench
from domino_spec.fast.policy import DepthPolicy, depths

Costs = dict[int, dict[int, float]]
"""Seconds by rows and by depth."""

_CONTEXT = 256
_MOST_ROUNDS = 5
_FEWEST_ROUNDS = 2
_ENOUGH_SECONDS = 1.0


def adapt_depth(engine: Engine, *, batches: Sequence[int] | None = None) -> DepthPolicy | None:
    """Let an idle engine choose its depth from now on; None where it has no drafter."""
    if engine.drafter is None:
        return None
    if engine.busy:
        raise InputError(
            f"{engine.running} rows are running; measuring would overwrite them. Call this first."
        )
    batches = batches or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= engine.slots.count]
    policy = DepthPolicy(costs_of(engine, batches), engine.depth)
    if engine.policy is not None:
        policy.acceptance = engine.policy.acceptance  # what was learnt does not depend on costs
    engine.policy = policy
    return policy


def costs_of(engine: Engine, batches: Sequence[int]) -> Costs:
    """From the file, or measured now and written there."""
    path = kept_file("costs", _facts(engine))
    found = _read(path)
    wanted = set(depths(engine.depth))
    missing = [batch for batch in batches if not wanted <= found.get(batch, {}).keys()]
    for batch, costs in (measure_costs(engine, missing) if missing else {}).items():
        found[batch] = found.get(batch, {}) | costs
    if missing:
        write_kept(path, found)
    return {batch: _rising({d: found[batch][d] for d in wanted}) for batch in batches}


def measure_costs(engine: Engine, batches: Sequence[int]) -> Costs:
    """Time one cycle of each depth with each number of rows."""
    bench = Bench(engine, context=min(_CONTEXT, engine.capacity))
    return {batch: _by_depth(bench, batch, depths(engine.depth)) for batch in batches}


def _by_depth(bench: Bench, batch: int, wanted: Sequence[int]) -> dict[int, float]:
    """On a CPU the least of a few rounds: whoever else works there only ever adds."""
    if bench.device.type == "cuda":
        return {depth: bench.cycle_seconds(batch, depth) for depth in wanted}
    slots, cycle = torch.arange(batch), bench.engine.cycle
    least = dict.fromkeys(wanted, math.inf)
    began = time.perf_counter()
    for turn in range(1 + _MOST_ROUNDS):
        for depth in wanted:
            bench.reset()
            start = time.perf_counter()
            cycle.run(slots, Plan(depth))
            if turn:  # the first round prepares what all others use
                least[depth] = min(least[depth], time.perf_counter() - start)
        if turn >= _FEWEST_ROUNDS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
    return least


def _rising(costs: dict[int, float]) -> dict[int, float]:
    """A cycle costs no more than a deeper one, which does all its work and more.

    What a busy moment added to a measurement that is kept for good would count for ever.
    """
    found: dict[int, float] = {}
    least = math.inf
    for depth in sorted(costs, reverse=True):
        least = min(least, costs[depth])
        found[depth] = least
    return dict(sorted(found.items()))


def _facts(engine: Engine) -> list[Any]:
    """Whatever changes a cycle's cost: machine, shapes, types, threads, versions."""
    assert engine.drafter is not None
    device = engine.target.device
    return [
        __version__,
        torch.__version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        torch.get_num_threads() if device.type == "cpu" else 0,
        str(engine.target.dtype),
        vars(engine.target.shape),
        engine.target.layers[0].nbytes,
        engine.target.cache.capacity if device.type == "cuda" else 0,  # CPUs look at lengths
        engine.packs,
        os.environ.get(runtime.SWITCH, ""),
        os.environ.get(overlap.SWITCH, ""),
        engine.target.vocab_size,
        len(engine.target.layers),
        engine.drafter.config.to_dict(),
        engine.drafter.candidates,
    ]


def _read(path: Path) -> Costs:
    try:
        return {
            int(batch): {int(depth): seconds(spent) for depth, spent in row.items()}
            for batch, row in read_kept(path).items()
        }
    except (ValueError, AttributeError, TypeError):
        return {}  # none yet, or not ours: it is measured again
