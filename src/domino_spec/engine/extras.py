"""What sampling, cutting off, penalising and scoring add to a cycle, each timed on its own.

Only what differs is timed, not the cycles around it: a difference of two whole cycles would drown
in what else happens on a machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine.costs import rising
from domino_spec.engine.cycle import KINDS, Plan
from domino_spec.engine.kernels.runtime import on_device
from domino_spec.engine.measure import Bench, seconds_of

Extras = dict[str, dict[int, float]]
"""Seconds by kind and depth."""

_NEEDS = {"filtered": "sampled", "ranked": "scored"}
"""Kinds that come on top of another one."""
_CHOOSING = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.5)
"""Of measured rows. A plan says which of it a cycle heeds; how much work it is, no value says."""
_ROUNDS = 3
_ENOUGH_SECONDS = 0.3


def measure_extras(bench: Bench, batch: int, depths: Sequence[int]) -> Extras:
    """What each kind of cycle costs besides a greedy one's seconds, with so many rows.

    What does not fit into memory (sorting takes much) costs infinitely much: nobody shall choose
    it. A plain step has to fit.
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
    # Of two that do not fit, nobody knows the difference.
    return {k: math.inf if math.isnan(e) else max(0.0, e) for k, e in extras.items()}


def _plan(depth: int, kind: str) -> Plan:
    flags = {kind, _NEEDS.get(kind, kind)}
    return Plan(depth, **dict.fromkeys(flags, True))


def _parts(
    bench: Bench, batch: int, depth: int, plans: Sequence[Plan]
) -> dict[tuple[str, Plan], Callable[[], Any]]:
    """The parts of a cycle that depend on how its rows choose, over states as a cycle has them."""
    engine, cycle = bench.engine, bench.engine.cycle
    target, drafter = engine.target, engine.drafter
    assert drafter is not None
    bench.reset()
    rows = bench.rows(batch, depth + 1)
    anchors = engine.slots.anchors[rows.slots].clone()
    block = anchors.unsqueeze(1).repeat(1, depth + 1)
    with on_device(bench.device):
        chooser = drafter.chooser(anchors, rows, depth)
        states, _ = target.forward(block, rows, ())
        logits = target.logits(states).view(batch, depth + 1, -1).clone()

    def draws(plan: Plan) -> Any:
        return engine.slots.draws(rows.slots, sampled=plan.sampled, filtered=plan.filtered)

    def drafts(plan: Plan) -> Callable[[], Any]:
        return lambda: chooser(draws(plan))

    def choice(plan: Plan) -> Callable[[], Any]:
        def choose() -> Any:
            chosen = cycle.choose(logits, block, rows, draws(plan), plan)
            return cycle.report(chosen, logits, block, rows.slots, plan)

        return choose

    parts = {("choice", plan): choice(plan) for plan in plans}
    if depth:
        greedy, sampled = Plan(depth), _plan(depth, "sampled")
        parts |= {("drafts", plan): drafts(plan) for plan in (greedy, sampled)}
    return parts


def _timed(
    bench: Bench, parts: dict[tuple[str, Plan], Callable[[], Any]]
) -> dict[tuple[str, Plan], float]:
    """On a CPU the least of a few rounds: whoever else works there only ever adds."""
    if bench.device.type == "cuda":
        return {name: _seconds_if_it_fits(bench, name[1], call) for name, call in parts.items()}
    least = dict.fromkeys(parts, math.inf)
    began = time.perf_counter()
    for turn in range(1 + _ROUNDS):
        for name, call in parts.items():
            start = time.perf_counter()
            call()
            if turn:  # the first round prepares what all others use
                least[name] = min(least[name], time.perf_counter() - start)
        if turn and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
    return least


def _seconds_if_it_fits(bench: Bench, plan: Plan, call: Callable[[], Any]) -> float:
    try:
        return seconds_of(call, bench.device)
    except torch.OutOfMemoryError:
        if not plan.depth:
            raise
        return math.inf
