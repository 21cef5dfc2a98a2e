"""Real text on the engine: with a drafter against without, prompt by prompt, side by side.

    python -m benchmarks.engine_text --draft released:smollm2-135m-instruct-cpu --sets gsm8k.jsonl

Both engines are the same code over the same weights; one has no drafter. They take turns on each
batch of prompts, so that a busy moment of the machine hits both. Prompts whose plain answer loops
or is short are left out. A record holds one set at one temperature, with every prompt's seconds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_spec.api.prompts import end_tokens
from domino_spec.checkpoints import load_drafter
from domino_spec.decoding import Row, RowStats, SamplingParams, make_sampler
from domino_spec.decoding.stopping import at_eos, at_length
from domino_spec.demo.models import smollm2
from domino_spec.evaluation import Protocol, encode_turns, read_turns
from domino_spec.fast.calibration import adapt_depth
from domino_spec.fast.engine import Engine
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, Target, default_device, load_target


@dataclass
class Timed:
    """One batch on one engine."""

    seconds: float
    answers: list[list[int]]
    counts: RowStats


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, eos: set[int]
) -> Timed:
    """All prompts of a batch at once; the clock starts when they are read."""
    rows = [
        Row(
            index,
            prompt,
            sampler=make_sampler(params, row=index, device=engine.target.device),
            stop_rules=[at_eos(eos), at_length()],
            max_new_tokens=params.max_new_tokens,
            device=engine.target.device,
        )
        for index, prompt in enumerate(prompts)
    ]
    for row in rows:
        engine.admit(row, params, seed=row.index)
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    spent = time.perf_counter() - start
    counts = RowStats()
    for row in rows:
        counts.add(row.stats)
    return Timed(spent, [row.generated for row in rows], counts)


def measure(
    engines: dict[str, Engine], name: str, prompts: Sequence[Sequence[int]], *,
    temperature: float, options: argparse.Namespace, eos: set[int],
) -> dict[str, Any]:  # fmt: skip
    """One set at one temperature."""
    params = SamplingParams(max_new_tokens=options.tokens, temperature=temperature)
    protocol = Protocol(max_new_tokens=options.tokens)
    lines = []
    for start in range(0, len(prompts), options.rows):
        batch = prompts[start : start + options.rows]
        found: dict[str, list[Timed]] = {label: [] for label in engines}
        for turn in range(-1, options.rounds):  # the first turn captures graphs and warms up
            order = list(engines) if turn % 2 == 0 else list(engines)[::-1]
            for label in order:
                timed = run(engines[label], batch, params, eos)
                if turn >= 0:
                    found[label].append(timed)
        plain, drafted = found["plain"], found["domino"]
        outcomes = [protocol.outcome(answer) for answer in plain[0].answers]
        lines.append(
            {
                "outcomes": outcomes,
                "plain_seconds": statistics.median(each.seconds for each in plain),
                "domino_seconds": statistics.median(each.seconds for each in drafted),
                "tokens": sum(map(len, plain[0].answers)),
                "committed": drafted[0].counts.committed,
                "cycles": drafted[0].counts.cycles,
                "identical": plain[0].answers == drafted[0].answers,
            }
        )
        print(name, temperature, lines[-1], flush=True)
    # A batch counts if most of its rows do: rows of a batch cannot be timed apart.
    used = [line for line in lines if line["outcomes"].count("used") * 2 > len(line["outcomes"])]
    seconds = {
        label: sum(line[f"{label}_seconds"] for line in used) for label in ("plain", "domino")
    }
    return {
        "set": name,
        "temperature": temperature,
        "batches": lines,
        "used": len(used),
        "speed_up": seconds["plain"] / seconds["domino"] if used else None,
        "tokens_per_cycle": sum(x["committed"] for x in used) / sum(x["cycles"] for x in used),
        "identical": sum(line["identical"] for line in lines),
    }


def main() -> None:
    """Every set at every temperature."""
    options = _options()
    device = default_device()
    dtype = getattr(torch, options.dtype)
    loaded = load_target(options.target or smollm2(), device=device, dtype=dtype)
    drafter = load_drafter(options.draft, dtype=dtype).drafter
    sizes = {"slots": options.rows, "capacity": 1024}
    engines = {
        "plain": Engine(_copy(loaded), None, **sizes),
        "domino": Engine(_copy(loaded), drafter, **sizes, candidates=options.candidates),
    }
    policy = adapt_depth(engines["domino"], batches=[options.rows])
    assert policy is not None
    eos = end_tokens(loaded.target, loaded.tokenizer)
    common = {
        "target": "SmolLM2-135M-Instruct",
        "drafter": Path(options.draft).name,
        "dtype": options.dtype,
        "rows": options.rows,
        "rounds": options.rounds,
        "new_tokens": options.tokens,
        "costs": policy.costs(options.rows),
        "threads": torch.get_num_threads(),
    }
    for path, temperature in itertools.product(options.sets, options.temperature):
        turns = read_turns(path, limit=options.limit)
        longest = Protocol().longest_prompt
        prompts = encode_turns(Path(path).stem, turns, loaded.tokenizer, longest=longest).prompts
        result = measure(
            engines, Path(path).stem, prompts, temperature=temperature, options=options, eos=eos
        )
        append_record(options.out, common | result | {"environment": environment()})
        pace, tokens = result["speed_up"], result["tokens_per_cycle"]
        print(f"{path} T={temperature}: {pace:.2f}x, {tokens:.2f} a cycle, {result['used']} used")


def _copy(loaded: LoadedTarget) -> Target:
    return Target(copy.deepcopy(loaded.target.model), name=loaded.target.name)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or GGUF file; else SmolLM2 as installed")
    parser.add_argument("--draft", default="released:smollm2-135m-instruct-cpu")
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--sets", nargs="+", required=True, help="JSON lines of turns")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--limit", type=int, help="prompts a set")
    parser.add_argument("--rows", type=int, default=1, help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=Path("records/engine-text.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
