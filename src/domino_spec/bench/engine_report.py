"""The engine held against the memory's floor, as one record: `domino bench engine`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from domino_spec.bench.settings import EngineSettings
from domino_spec.decoding import SamplingParams, make_sampler
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.drafter import Drafter, SequenceSampler
from domino_spec.decoding.stats import now
from domino_spec.drafters import BlockDrafter
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import Bench, accepted_pattern, bandwidth, expected, geometric
from domino_spec.engine.model_runner import Plan
from domino_spec.engine.policy import depths
from domino_spec.engine.shapes import random_drafter, random_target
from domino_spec.engine.weights import nbytes
from domino_spec.quantization.modules import quantized_weights
from domino_spec.targets import Target, default_device

Say = Callable[[str], None]


def measure_engine(settings: EngineSettings, say: Say) -> dict[str, Any]:
    """Everything, in one run."""
    device = default_device() if settings.device is None else torch.device(settings.device)
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    speed = bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    say(f"making {settings.shape} with random weights")
    target = random_target(
        settings.shape, device=device, dtype=getattr(torch, dtype), quantize=settings.quantize
    )
    drafter = BlockDrafter(random_drafter(target), candidates=settings.candidates)
    depth = drafter.depth
    engine = Engine(
        target,
        drafter,
        slots=max(settings.rows),
        capacity=settings.context + 128 * (depth + 1),
    )
    engine.runner.start_cycle([0], Plan(depth))()
    record: dict[str, Any] = {
        "shape": settings.shape,
        "dtype": dtype,
        "quantize": settings.quantize,
        "candidates": settings.candidates,
        "context": settings.context,
        "depth": depth,
        "forced": list(settings.tokens_per_cycle),
        "bandwidth": speed,
        "first_cycle_seconds": time.perf_counter() - began,
    }
    bench = Bench(engine, context=settings.context)
    say("timing one sequence")
    record |= one_sequence(bench, speed)
    record["batches"] = []
    for batch in settings.rows:
        say(f"timing {batch} sequences at a time")
        record["batches"].append(batch_gains(bench, batch, settings.tokens_per_cycle))
    say("running the engine's own loop")
    record["loop"] = [
        pace
        for batch in sorted({1, max(settings.rows)})
        for pace in loop_paces(bench, batch, settings.tokens_per_cycle)
    ]
    record["memory"] = memory(engine, target, drafter)
    if settings.reference:
        say("timing the Transformers loop")
        record["reference"] = reference_seconds(target, drafter, settings.context)
    return record


def memory(engine: Engine, target: Target, drafter: Drafter) -> dict[str, int]:
    """Bytes of weights and caches, and on a GPU the most that was held at a time."""
    stored = [*target.model.parameters(), *quantized_weights(target.model).values()]
    found = {
        "weights": nbytes(stored) + drafter.weight_bytes,
        "caches": engine.cache_bytes,
    }
    if engine.target.device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(engine.target.device)
    return found


def one_sequence(bench: Bench, speed: float) -> dict[str, Any]:
    """Plain steps, cycles and their stages, each with its floor."""
    depth = bench.engine.depth
    found: dict[str, Any] = {}
    for name, seconds in (
        ("cycle", bench.cycle_seconds(1, Plan(depth))),
        ("plain", bench.plain_seconds(1)),
    ):
        size = bench.floor_bytes(1, drafts=name == "cycle")
        found[name] = _held(seconds, size, speed)
    found["tree"] = tree_cost(bench)
    found["stages"] = [
        {"name": stage.name, **_held(stage.seconds, stage.bytes, speed)}
        for stage in bench.stages(1, depth)
    ]
    return found


def tree_cost(bench: Bench) -> dict[str, Any]:
    """A cycle with a tree of as many drafts as the chain has, and the making of the tree in it.

    In turns with the chain's own, since what is compared differs by little.
    """
    depth = bench.engine.depth
    nodes = bench.engine.drafter.tree_nodes(depth, depth) if bench.engine.drafter else depth
    turns = [
        (bench.cycle_seconds(1, Plan(depth)), bench.cycle_seconds(1, Plan(depth, nodes)))
        for _ in range(3)
    ]
    chain, tree = (statistics.median(each) for each in zip(*turns, strict=True))
    stages = {stage.name: stage.seconds for stage in bench.tree_stages(1, depth, nodes)}
    return {"nodes": nodes, "chain": chain, "seconds": tree, "stages": stages}


def _held(seconds: float, size: int, speed: float) -> dict[str, float]:
    floor = size / speed
    return {"seconds": seconds, "bytes": size, "floor": floor, "over_floor": seconds / floor}


def batch_gains(bench: Bench, batch: int, wanted: Sequence[float]) -> dict[str, Any]:
    """Seconds by depth, and the depth that gains most where a draft is as likely as forced.

    Depth 0 is plain decoding without a drafter, against which gains are reckoned.
    """
    limit = bench.engine.depth
    spent = {0: bench.plain_seconds(batch)}
    spent |= {depth: bench.cycle_seconds(batch, Plan(depth)) for depth in depths(limit) if depth}
    gains = []
    for tokens in wanted:
        chance = geometric(tokens, limit)
        # The quotient of times first: plain decoding's gain over itself is 1, not nearly 1.
        each = {depth: expected(chance, depth) * (spent[0] / spent[depth]) for depth in spent}
        best = max(each, key=lambda depth: each[depth])
        gains.append({"forced": tokens, "depth": best, "gain": each[best], "whole": each[limit]})
    return {"rows": batch, "seconds": spent, "plain_per_second": batch / spent[0], "gains": gains}


def loop_paces(bench: Bench, batch: int, wanted: Sequence[float]) -> list[dict[str, Any]]:
    """Tokens a second of the engine itself, whole blocks, against its plain decoding."""
    limit = bench.engine.depth
    plain = bench.paced(batch, 0, [0], cycles=96)
    found = []
    for tokens in wanted:
        pattern = accepted_pattern(geometric(tokens, limit), limit)
        pace = bench.paced(batch, limit, pattern, cycles=64)
        found.append({"rows": batch, "forced": tokens, "per_second": pace, "gain": pace / plain})
    return found


@torch.no_grad()
def reference_seconds(target: Target, drafter: Drafter, context: int) -> dict[str, float]:
    """A plain step and a cycle of the reference loop, through Transformers."""
    prompt = torch.ones(1, context, dtype=torch.long)
    cache, bound = target.new_cache(1), drafter.bind(target)
    depth, layers = bound.depth, bound.capture_layers
    bound.resize(slots=1, capacity=context + 2 * (depth + 1) + bound.lookahead)
    output = target.forward(prompt, cache, capture_layers=layers, keep=[context - 1])
    assert output.captured is not None
    cache.commit([context])
    slots, starts = torch.tensor([[0], [0]], device=target.device)
    bound.update_cache(
        output.captured.flatten(0, 1), prompt.to(target.device), slots=slots, starts=starts
    )
    sequence = Decoded(prompt[0].tolist(), SamplingParams(max_new_tokens=4), index=0)
    sequence.sampler = make_sampler(sequence)
    sequence.take([1])
    anchors = torch.ones(1, dtype=torch.long, device=target.device)

    def step(count: int) -> None:
        block = torch.ones(1, count, dtype=torch.long)
        target.forward(block, cache, capture_layers=layers if count > 1 else ()).logits.argmax(-1)
        cache.commit([0])

    def cycle() -> None:
        bound.propose(
            anchors,
            slots=slots,
            starts=starts + context,
            depth=depth,
            sampler=SequenceSampler([sequence]),
        )
        step(depth + 1)

    return {"plain": _clocked(lambda: step(1), target), "cycle": _clocked(cycle, target)}


def _clocked(call: Callable[[], None], target: Target, *, repeats: int = 5) -> float:
    call()
    spent = []
    for _ in range(repeats):
        start = now(target.device)
        call()
        spent.append(now(target.device) - start)
    return statistics.median(spent)
