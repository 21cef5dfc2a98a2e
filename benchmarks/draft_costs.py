"""What drafts can gain on a CPU: the cost of cycles by depth, and acceptance lengths by depth.

    python -m benchmarks.draft_costs FILE.gguf --draft DRAFTER --prompts FILES... --out FILE

One sequence. Costs are timed in turns: a plain step, the target's forward over so many drafts and
the token before them, a cycle whose drafts cost nothing, and a cycle with the drafter's. Other load
only ever adds, so the least of many rounds counts; medians of the rounds' ratios are kept too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.api.prompts import end_tokens
from domino_spec.bench.tasks import read_tasks
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.decoding.drafter import Drafter, PlainDecoding
from domino_spec.drafters import open_drafter
from domino_spec.engine.engine import Engine
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import Plan
from domino_spec.evaluation import Protocol
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, Target, load_target

PLAIN = "plain"


class FreeDrafter(PlainDecoding):
    """Drafts that take no time: the token before them."""

    kind = "free"
    default_depth = 1
    max_depth = 64

    def propose(self, anchors: Tensor, *, depth: int, **_: Any) -> Tensor:
        """So many columns."""
        return anchors.unsqueeze(1).expand(-1, depth)


def costs(
    target: Target, drafter: Drafter, depths: Sequence[int], *, context: int, rounds: int
) -> dict[str, Any]:
    """Of each kind of work its least seconds, and the median of its ratios to a plain step.

    And of each part of a cycle at every depth its least median.
    """
    most = max(depths)
    room: dict[str, Any] = {"slots": 1, "capacity": context + most + 1}
    engine = Engine(target, drafter, **room)
    free = Engine(target, FreeDrafter(), depth=most, **room)
    benches = [Bench(each, context=context) for each in (engine, free)]
    slots = torch.arange(1)
    calls: dict[str, Callable[[], Any]] = {
        PLAIN: partial(free.runner.run_cycle, slots, Plan(0, alone=True))
    }
    for depth in depths:
        calls[f"forward {depth}"] = partial(_forward, benches[1], depth)
        calls[f"free {depth}"] = partial(free.runner.run_cycle, slots, Plan(depth))
        calls[f"cycle {depth}"] = partial(engine.runner.run_cycle, slots, Plan(depth))
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + rounds):
        for name, call in calls.items():
            for bench in benches:
                bench.reset(1)
            start = time.perf_counter()
            call()
            if turn:  # the first round prepares the others
                spent[name].append(time.perf_counter() - start)
    whole = {
        name: {
            "seconds": min(each),
            "median_ratio": statistics.median(
                own / plain for own, plain in zip(each, spent[PLAIN], strict=True)
            ),
        }
        for name, each in spent.items()
    }
    return {"costs": whole, "parts": {depth: _parts(benches[0], depth) for depth in depths[1:]}}


def _parts(bench: Bench, depth: int) -> dict[str, float]:
    runs = [bench.stages(1, depth) for _ in range(5)]
    return {each[0].name: min(stage.seconds for stage in each) for each in zip(*runs, strict=True)}


@torch.no_grad()
def _forward(bench: Bench, depth: int) -> Tensor:
    model = bench.engine.target
    block = torch.ones(1, depth + 1, dtype=torch.long)
    states, _ = model.forward(block, bench.metadata(1, depth + 1), ())
    return model.logits(states)


def acceptance(
    loaded: LoadedTarget, drafter: Drafter, depths: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    """Acceptance length by set and depth, of answers that are no loops and not short."""
    target, tokenizer = loaded.target, loaded.tokenizer
    protocol = Protocol(max_new_tokens=args.tokens)
    eos = end_tokens(target, tokenizer)
    how = SamplingParams(max_new_tokens=args.tokens, temperature=0.0)
    longest = protocol.longest_for(target)
    tasks = read_tasks(list(map(str, args.prompts)), limit=args.limit)
    sets = {task.name: task.encoded(tokenizer, longest=longest).prompts for task in tasks}
    used: dict[str, list[int]] = {}
    lengths: dict[str, dict[str, float]] = {name: {} for name in (*sets, "all")}
    deepest: AcceptanceStats | None = None
    for depth in sorted(depths, reverse=True):
        engine = Engine(
            target, drafter, depth=depth, slots=args.batch, capacity=longest + args.tokens
        )
        every = []
        for name, prompts in sets.items():
            found = engine.generate(list(map(list, prompts)), how, eos=eos)
            own = [
                place for place, each in enumerate(found) if protocol.outcome(each.output) == "used"
            ]
            assert used.setdefault(name, own) == own, "the text does not depend on the depth"
            stats = [found[place].stats for place in own]
            lengths[name][str(depth)] = AcceptanceStats.sum(stats).tokens_per_cycle
            every += stats
        total = AcceptanceStats.sum(every)
        deepest = deepest or total
        lengths["all"][str(depth)] = total.tokens_per_cycle
        print(depth, total.tokens_per_cycle, flush=True)
    assert deepest is not None
    return {
        "acceptance_length": lengths,
        "used": {name: len(own) for name, own in used.items()},
        "asked": {name: len(prompts) for name, prompts in sets.items()},
        "accepted": deepest.accepted,
        "cycles": deepest.cycles,
    }


def main() -> None:
    """One record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantize", default="keep")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--depths", type=int, nargs="+", help="unset: all that there are")
    parser.add_argument("--limit", type=int, default=20, help="Prompts a set.")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=4, help="Answers made together.")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loaded = load_target(str(args.target), quantize=args.quantize, device="cpu")
    drafter = open_drafter(args.draft, loaded)
    args.depths = args.depths or range(1, (drafter.max_depth or drafter.default_depth) + 1)
    found: dict[str, Any] = {
        "target": args.target.name, "quantize": args.quantize, "drafter": drafter.name,
        "context": args.context, "rounds": args.rounds, "new_tokens": args.tokens,
        **costs(
            loaded.target, drafter, [0, *args.depths], context=args.context, rounds=args.rounds
        ),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    found |= acceptance(loaded, drafter, args.depths, args)
    append_record(args.out, {**found, "environment": environment()})


if __name__ == "__main__":
    main()
