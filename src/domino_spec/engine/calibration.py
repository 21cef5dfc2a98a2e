"""What cycles cost on this machine: measured once, kept in a file."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from domino_spec import __version__
from domino_spec.cache import (
    measurement_file,
    processor,
    read_measurement,
    seconds,
    write_measurement,
)
from domino_spec.decoding import SamplingParams
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels import overlap, runtime
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.kernels.trees import MAX_ROWS
from domino_spec.engine.measure import Bench, least_seconds, seconds_of
from domino_spec.engine.model_runner import KINDS, Drafted, Plan
from domino_spec.engine.policy import (
    LEAST_RAGGED,
    Costs,
    DepthPolicy,
    budgeted,
    budgets,
    depths,
    rising,
    trees,
)
from domino_spec.errors import InputError
from domino_spec.quantization.memory import give_back_freed

Measured = dict[int, dict[str, dict[int, float]]]
"""Seconds by batch size, kind and depth: of whole cycles under `_GREEDY`, else what is added.

Under `_TREES` and `_BUDGETS` of whole cycles too, by the number of nodes, or by the budget."""

_COSTS_OF = "2026-11-20"
"""When code last changed what cycles cost by much: what was measured before is not read."""
_GREEDY, _TREES, _BUDGETS = "greedy", "trees", "budgets"
_WHOLE = (_GREEDY, _TREES, _BUDGETS)
_BATCH_SIZES = (1, 4, 16, 64)
_CONTEXT = 256
_MOST_ROUNDS = 5
_FEWEST_ROUNDS = 2
_ENOUGH_SECONDS = 1.0
_MOST_SECONDS = 40.0
"""Of measuring on a CPU, after which no further batch size is begun."""
Extras = dict[str, dict[int, float]]
"""Seconds by kind and depth."""

_NEEDS = {"uncoupled": "sampled", "filtered": "sampled", "ranked": "scored"}
"""Kinds that come on top of another one."""
_CHOOSING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5)
"""Of measured sequences. A plan says what of it a cycle evaluates; the values change no work."""
_EXTRA_ROUNDS = 3
_ENOUGH_EXTRA_SECONDS = 0.3


def adapt_depth(
    engine: Engine, *, batches: Sequence[int] | None = None, anew: bool = False
) -> DepthPolicy | None:
    """Let an idle engine choose its depth from now on; None where it has no drafter.

    `anew` does not read what was measured before.
    """
    if engine.drafter is None:
        return None
    if engine.running:
        raise InputError(
            f"{engine.running} sequences are running; measuring would overwrite them. Call this "
            "first."
        )
    batches = batches or measured_sizes(engine.slots.count)
    costs = costs_of(engine, batches, anew=anew)
    policy = DepthPolicy(costs, engine.depth, engine.nodes)
    if engine.policy is not None:  # what was learnt does not depend on costs
        policy.acceptance, policy.drawn = engine.policy.acceptance, engine.policy.drawn
        policy.promises = engine.policy.promises
    engine.policy = policy
    return policy


def measured_sizes(slots: int) -> list[int]:
    """Batch sizes worth measuring; costs in between are interpolated."""
    most = min(slots, _BATCH_SIZES[-1])
    return sorted({size for size in _BATCH_SIZES if size < most} | {most})


def costs_of(engine: Engine, batches: Sequence[int], *, anew: bool = False) -> Costs:
    """From the file, or measured now and, if the machine was quiet enough, written there."""
    path = measurement_file("costs", _facts(engine))
    found = {} if anew else _read(path)
    wanted = {batch: points(engine, batch) for batch in batches}
    missing = [
        batch
        for batch in batches
        if not all(
            found.get(batch, {}).get(kind, {}).keys() >= set(chosen)
            for kind, chosen in wanted[batch].items()
        )
    ]
    settled = bool(missing)
    if missing:
        with engine.runner.learning_nothing():
            new, settled = measure_costs(engine, missing)
        for batch, measured in new.items():
            kept = found.setdefault(batch, {})
            for kind, spent in measured.items():
                kept[kind] = kept.get(kind, {}) | spent
    if settled:
        write_measurement(path, _finite(found))  # what did not fit today may fit tomorrow
    greedy, *added = (
        {batch: {d: found[batch][kind][d] for d in wanted[batch][kind]} for batch in batches}
        for kind in (_GREEDY, *KINDS)
    )
    never = dict.fromkeys(trees(engine.nodes), math.inf)
    branched = {
        batch: never | {n: found[batch][_TREES][n] for n in wanted[batch][_TREES]}
        for batch in batches
        if never
    }
    shared = {
        batch: {b: found[batch][_BUDGETS][b] for b in wanted[batch][_BUDGETS]}
        for batch in batches
        if wanted[batch][_BUDGETS]
    }
    return Costs(greedy, dict(zip(KINDS, added, strict=True)), branched, shared)


def points(engine: Engine, batch: int) -> dict[str, tuple[int, ...]]:
    """The depths at which each kind of cycle is timed, the sizes of trees, and budgets.

    Greedy ones at all. What other kinds add goes token by token; but a GPU sorts few tokens in
    another way than many, and only its shallow cycles are about launching: one depth is between.
    """
    every = depths(engine.depth)
    few, branched = {0, engine.depth}, trees(engine.nodes)
    if engine.target.device.type == "cuda":
        few.add(every[len(every) // 2])
        if batch > MAX_ROWS:  # no kernels make their trees
            branched = ()
    shared = budgets(engine.depth) if engine.has_chances and batch >= LEAST_RAGGED else ()
    own = {_GREEDY: every, _TREES: branched, _BUDGETS: shared}
    return own | dict.fromkeys(KINDS, tuple(sorted(few)))


def measure_costs(engine: Engine, batches: Sequence[int]) -> tuple[Measured, bool]:
    """Time one cycle of each depth and batch size, and what each kind adds; whether it is settled.

    On a CPU this ends within a minute: larger batches that would take longer are extrapolated
    from the last that was measured.
    """
    bench = Bench(engine, context=min(_CONTEXT, engine.capacity))
    found: Measured = {}
    settled, began, last = True, time.perf_counter(), 0.0
    for batch in sorted(batches):
        own, start = points(engine, batch), time.perf_counter()
        late = start - began + 2 * last > _MOST_SECONDS
        if found and late and bench.device.type == "cpu":
            before = max(found)
            found[batch] = {
                kind: _extrapolated(times, before, batch) for kind, times in found[before].items()
            }
            # Too few sequences have no budget: as much as chains of so many drafts, until seen.
            if own[_BUDGETS] and _BUDGETS not in found[batch]:
                found[batch][_BUDGETS] = {b: found[batch][_GREEDY][b] for b in own[_BUDGETS]}
            continue
        whole, steady = _whole_cycles(bench, batch, {kind: own[kind] for kind in _WHOLE})
        give_back_freed()  # what choosing takes does not fit into what cycles left
        found[batch] = whole | measure_extras(bench, batch, own[KINDS[0]])
        settled = settled and steady
        last = time.perf_counter() - start
        give_back_freed()
    return found, settled


def _extrapolated(times: Mapping[int, float], measured: int, batch: int) -> dict[int, float]:
    """Seconds by drafts of another batch size: on a CPU they go by the tokens verified."""
    points = [((count + 1) * measured, seconds) for count, seconds in rising(times).items()]
    if len(points) < 2:
        return {count: seconds * batch / measured for count, seconds in times.items()}
    slopes = [
        (low, seconds, (more - seconds) / (high - low))
        for (low, seconds), (high, more) in itertools.pairwise(points)
    ]

    def at(tokens: int) -> float:
        low, seconds, slope = next(
            (each for each in reversed(slopes) if each[0] <= tokens), slopes[0]
        )
        return seconds + slope * (tokens - low)

    return {count: at((count + 1) * batch) for count in times}


def _whole_cycles(
    bench: Bench, batch: int, points: Mapping[str, Sequence[int]]
) -> tuple[dict[str, dict[int, float]], bool]:
    deepest = bench.engine.depth
    plans = {(_GREEDY, depth): Plan(depth) for depth in points[_GREEDY]}
    plans |= {(_TREES, n): Plan(min(n, deepest), n) for n in points[_TREES]}
    plans |= {(_BUDGETS, b): Plan(**budgeted(b, deepest)._asdict()) for b in points[_BUDGETS]}
    settled = True
    if bench.device.type == "cuda":
        spent = {name: bench.cycle_seconds(batch, plan) for name, plan in plans.items()}
    else:
        slots, runner = torch.arange(batch), bench.engine.runner
        spent, settled = least_seconds(
            {name: partial(runner.run_cycle, slots, plan) for name, plan in plans.items()},
            most=_MOST_ROUNDS,
            fewest=_FEWEST_ROUNDS,
            enough=_ENOUGH_SECONDS,
            before=partial(bench.reset, batch),
        )
    found: dict[str, dict[int, float]] = {}
    for (kind, count), least in spent.items():
        found.setdefault(kind, {})[count] = least
    return found, settled


def _facts(engine: Engine) -> list[Any]:
    """Whatever changes a cycle's cost: machine, shapes, types, threads, versions."""
    assert engine.drafter is not None
    device = engine.target.device
    return [
        __version__,
        _COSTS_OF,
        torch.__version__,
        torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        torch.get_num_threads() if device.type == "cpu" else 0,
        str(engine.target.dtype),
        vars(engine.target.shape),
        engine.target.layers[0].nbytes,
        *engine.target.layers[0].kinds,
        engine.target.cache.capacity if device.type == "cuda" else 0,  # CPUs look at lengths
        engine.packs,
        os.environ.get(runtime.SWITCH, ""),
        os.environ.get(overlap.SWITCH, ""),
        engine.target.vocab_size,
        len(engine.target.layers),
        engine.depth,
        *engine.drafter.cost_key,
    ]


def _read(path: Path) -> Measured:
    try:
        return {
            int(batch): {
                kind: {int(depth): check(spent) for depth, spent in times.items()}
                for kind, times in row.items()
                for check in (seconds if kind in _WHOLE else _added,)
            }
            for batch, row in read_measurement(path).items()
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


# What sampling, filtering, penalties and scores add. Only what differs is timed: a difference of
# two whole cycles would drown in noise.


def measure_extras(bench: Bench, batch: int, depths: Sequence[int]) -> Extras:
    """What each kind of cycle adds to a greedy one of this batch size.

    What does not fit into memory (sorting takes much) costs infinitely much, so it is never chosen.
    A plain step has to fit.
    """
    found: Extras = {kind: {} for kind in KINDS}
    with torch.no_grad(), bench.engine.slots.choosing(_CHOOSING):
        for depth in depths:
            try:
                spent = _at_depth(bench, batch, depth)
            except torch.OutOfMemoryError:
                if not depth:
                    raise
                spent = dict.fromkeys(KINDS, math.inf)
            for kind in KINDS:
                found[kind][depth] = spent[kind]
    return {kind: rising(added) for kind, added in found.items()}


def _at_depth(bench: Bench, batch: int, depth: int) -> dict[str, float]:
    plans = {kind: _plan(depth, kind) for kind in KINDS} | {None: Plan(depth)}
    spent = _timed(bench, _parts(bench, batch, depth, list(plans.values())))
    extras = {}
    for kind in KINDS:
        own, without = plans[kind], plans[_NEEDS.get(kind)]
        extras[kind] = spent["choice", own] - spent["choice", without]
        if kind == "sampled" and depth:
            extras[kind] += spent["drafts", own] - spent["drafts", without]
    # The difference of two that do not fit is unknown.
    return {k: math.inf if math.isnan(e) else max(0.0, e) for k, e in extras.items()}


def _plan(depth: int, kind: str) -> Plan:
    flags = {kind, _NEEDS.get(kind, kind)}
    return Plan(depth, **dict.fromkeys(flags, True))


def _parts(
    bench: Bench, batch: int, depth: int, plans: Sequence[Plan]
) -> dict[tuple[str, Plan], Callable[[], Any]]:
    """The parts of a cycle that depend on how tokens are chosen, over a cycle's states."""
    engine, runner = bench.engine, bench.engine.runner
    target, drafter = engine.target, engine.drafter
    assert drafter is not None
    bench.reset(batch)
    metadata = bench.metadata(batch, depth + 1)
    anchors = engine.slots.anchors[metadata.slots].clone()
    block = anchors.unsqueeze(1).repeat(1, depth + 1)
    with on_device(bench.device):
        states, _ = target.forward(block, metadata, ())
        logits = target.logits(states).view(batch, depth + 1, -1).clone()

    places: dict[str, Any] = {"slots": metadata.slots, "starts": metadata.starts, "depth": depth}

    def drafts(plan: Plan) -> Callable[[], Any]:
        with on_device(bench.device):  # the last part is the one that chooses
            sampler = runner.draws(metadata.slots, plan)
            parts = drafter.parts(anchors, **places, sampler=sampler, cached=0)
        return parts[-1][1]

    def choice(plan: Plan) -> Callable[[], Any]:
        sampler = runner.draws(metadata.slots, plan).for_drafts(metadata.starts)
        if depth and sampler.kept is not None:
            with on_device(bench.device):
                drafter.propose(anchors, **places, sampler=sampler)
        drawn_from = [replace(each, logits=each.logits.clone()) for each in sampler.kept or []]
        drafted = Drafted(metadata, block, drawn_from=drawn_from)

        def choose() -> Any:
            draws = runner.draws(metadata.slots, plan)
            chosen, accepted = runner.choose(logits, drafted, draws, plan)
            return runner.report(chosen, logits, block, metadata.slots, plan, accepted)

        return choose

    parts = {("choice", plan): choice(plan) for plan in plans}
    if depth:
        greedy, sampled = Plan(depth), _plan(depth, "sampled")
        parts |= {("drafts", plan): drafts(plan) for plan in (greedy, sampled)}
    return parts


def _timed(
    bench: Bench, parts: dict[tuple[str, Plan], Callable[[], Any]]
) -> dict[tuple[str, Plan], float]:
    if bench.device.type == "cuda":
        return {name: _seconds_if_it_fits(bench, name[1], call) for name, call in parts.items()}
    return least_seconds(parts, most=_EXTRA_ROUNDS, enough=_ENOUGH_EXTRA_SECONDS)[0]


def _seconds_if_it_fits(bench: Bench, plan: Plan, call: Callable[[], Any]) -> float:
    try:
        return seconds_of(call, bench.device)
    except torch.OutOfMemoryError:
        if not plan.depth:
            raise
        return math.inf
