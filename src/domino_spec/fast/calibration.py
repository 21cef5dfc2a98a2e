"""What cycles cost on this machine: measured once, kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from domino_spec.errors import InputError
from domino_spec.fast.engine import Engine
from domino_spec.fast.kernels.runtime import SWITCH
from domino_spec.fast.measure import Bench
from domino_spec.fast.policy import DepthPolicy, depths

Costs = dict[int, dict[int, float]]
"""Seconds by rows and by depth."""

_CONTEXT = 256
_FOLDER = "DOMINO_CACHE"


def adapt_depth(engine: Engine, *, batches: Sequence[int] | None = None) -> DepthPolicy | None:
    """Let an idle engine choose its depth from now on; None where it has no drafter."""
    if engine.drafter is None:
        return None
    if engine.busy:
        raise InputError(
            f"{engine.running} rows are running; measuring would overwrite them. Call this first."
        )
    batches = batches or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= engine.slots.count]
    engine.policy = DepthPolicy(costs_of(engine, batches), engine.depth)
    return engine.policy


def costs_of(engine: Engine, batches: Sequence[int]) -> Costs:
    """From the file, or measured now and written there."""
    path = cache_folder() / "costs" / f"{_key(engine)}.json"
    found = _read(path)
    wanted = set(depths(engine.depth))
    missing = [batch for batch in batches if not wanted <= found.get(batch, {}).keys()]
    for batch, costs in (measure_costs(engine, missing) if missing else {}).items():
        found[batch] = found.get(batch, {}) | costs
    if missing:
        _write(path, found)
    return {batch: {d: found[batch][d] for d in sorted(wanted)} for batch in batches}


def measure_costs(engine: Engine, batches: Sequence[int]) -> Costs:
    """Time one cycle of each depth with each number of rows."""
    bench = Bench(engine, context=min(_CONTEXT, engine.capacity))
    return {
        batch: {depth: bench.cycle_seconds(batch, depth) for depth in depths(engine.depth)}
        for batch in batches
    }


def cache_folder() -> Path:
    """$DOMINO_CACHE, else the user's own cache folder."""
    if os.environ.get(_FOLDER):
        return Path(os.environ[_FOLDER])
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "domino-spec"


def _key(engine: Engine) -> str:
    """Whatever changes a cycle's cost: machine, shapes, types, threads, versions."""
    assert engine.drafter is not None
    device = engine.target.device
    facts: list[Any] = [
        torch.__version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        torch.get_num_threads() if device.type == "cpu" else 0,
        str(engine.target.dtype),
        vars(engine.target.shape),
        engine.target.layers[0].nbytes,
        engine.target.cache.capacity,
        engine.packs,
        os.environ.get(SWITCH, ""),
        engine.target.vocab_size,
        len(engine.target.layers),
        engine.drafter.config.to_dict(),
        engine.drafter.candidates,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line for line in lines if line.startswith("model name")), "cpu")


def _read(path: Path) -> Costs:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {int(b): {int(d): _cost(s) for d, s in row.items()} for b, row in values.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # none yet, or not ours: it is measured again


def _cost(value: Any) -> float:
    seconds = float(value)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(value)
    return seconds


def _write(path: Path, costs: Costs) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(costs), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return
