"""What cycles cost on this machine: measured once, kept in a file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from domino_spec import __version__
from domino_spec.engine.costs import Costs
from domino_spec.engine.cycle import KINDS, Plan
from domino_spec.engine.engine import Engine
from domino_spec.engine.extras import measure_extras
from domino_spec.engine.kept import kept_file, processor, read_kept, seconds, write_kept
from domino_spec.engine.kernels import overlap, runtime
from domino_spec.engine.measure import Bench
from domino_spec.engine.policy import DepthPolicy, depths
from domino_spec.errors import InputError

Measured = dict[int, dict[str, dict[int, float]]]
"""Seconds by rows, kind and depth: those of whole cycles under `_GREEDY`, else what is added."""

_GREEDY = "greedy"
_MEASURED_ROWS = (1, 4, 16, 64)
_CONTEXT = 256
_MOST_ROUNDS = 5
_FEWEST_ROUNDS = 2
_ENOUGH_SECONDS = 1.0


def adapt_depth(engine: Engine, *, batches: Sequence[int] | None = None) -> DepthPolicy | None:
    """Let an idle engine choose its depth from now on; None where it has no drafter."""
    if engine.drafter is None:
        return None
    if engine.running:
        raise InputError(
            f"{engine.running} sequences are running; measuring would overwrite them. Call this "
            "first."
        )
    batches = batches or measured_rows(engine.slots.count)
    policy = DepthPolicy(costs_of(engine, batches), engine.depth)
    if engine.policy is not None:  # what was learnt does not depend on costs
        policy.acceptance, policy.drawn = engine.policy.acceptance, engine.policy.drawn
    engine.policy = policy
    return policy


def measured_rows(slots: int) -> list[int]:
    """Numbers of rows worth measuring; a cost in between is near the line."""
    most = min(slots, _MEASURED_ROWS[-1])
    return sorted({rows for rows in _MEASURED_ROWS if rows < most} | {most})


def costs_of(engine: Engine, batches: Sequence[int]) -> Costs:
    """From the file, or measured now and written there."""
    path = kept_file("costs", _facts(engine))
    found, wanted = _read(path), points(engine)
    missing = [batch for batch in batches if not _holds(found.get(batch, {}), wanted)]
    for batch, measured in (measure_costs(engine, missing) if missing else {}).items():
        kept = found.setdefault(batch, {})
        for kind, spent in measured.items():
            kept[kind] = kept.get(kind, {}) | spent
    if missing:
        write_kept(path, _finite(found))  # what did not fit today may fit tomorrow
    greedy, *added = (
        {batch: {d: found[batch][kind][d] for d in wanted[kind]} for batch in batches}
        for kind in (_GREEDY, *KINDS)
    )
    return Costs(greedy, dict(zip(KINDS, added, strict=True)))


def points(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The depths at which each kind of cycle is timed.

    Greedy ones at all. What other kinds add goes token by token; but a GPU sorts few tokens in
    another way than many, and only its shallow cycles are about launching: one depth is between.
    """
    every = depths(engine.depth)
    few = {0, engine.depth}
    if engine.target.device.type == "cuda":
        few.add(every[len(every) // 2])
    return {_GREEDY: every} | dict.fromkeys(KINDS, tuple(sorted(few)))


def measure_costs(engine: Engine, batches: Sequence[int]) -> Measured:
    """Time one cycle of each depth with each number of rows, and what each kind adds."""
    bench = Bench(engine, context=min(_CONTEXT, engine.capacity))
    chosen = points(engine)
    return {
        batch: {_GREEDY: _by_depth(bench, batch, chosen[_GREEDY])}
        | measure_extras(bench, batch, chosen[KINDS[0]])
        for batch in batches
    }


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


def _holds(found: dict[str, dict[int, float]], wanted: Mapping[str, Sequence[int]]) -> bool:
    return all(found.get(kind, {}).keys() >= set(chosen) for kind, chosen in wanted.items())


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
        *engine.drafter.facts,
    ]


def _read(path: Path) -> Measured:
    try:
        return {
            int(batch): {
                kind: {int(depth): check(spent) for depth, spent in times.items()}
                for kind, times in row.items()
                for check in (seconds if kind == _GREEDY else _added,)
            }
            for batch, row in read_kept(path).items()
        }
    except (ValueError, AttributeError, TypeError):
        return {}  # none yet, or not ours: it is measured again


def _finite(found: Measured) -> Measured:
    return {
        batch: {
            kind: {depth: spent for depth, spent in times.items() if math.isfinite(spent)}
            for kind, times in row.items()
        }
        for batch, row in found.items()
    }


def _added(value: Any) -> float:
    """Seconds that may be none."""
    return 0.0 if value == 0 else seconds(value)
