"""Trains drafters alike but for a few settings, for the same seconds, and measures all alike.

    python -m benchmarks.sweep PLAN.yaml --target TARGET --data SHARDS... --sets FILES...

A plan holds `seconds`, `base` settings and `runs`, each a `name` and its own `settings` (and
`seconds`, and an idea of `benchmarks.tried`). Seconds are those of training alone: the compiler,
evaluations and files are not counted. Acceptance lengths of block drafters are simulated on the
target's own greedy answers, which is what greedy decoding would give; other drafters decode. A run
that fails is on record too, and the next one follows.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.sweep_sets import Sets, held_out_set, load_sets
from benchmarks.tried import tried
from domino_spec.api import DominoDecoder
from domino_spec.data import Corpus, load_corpus
from domino_spec.drafter import DraftModel, DraftModule
from domino_spec.drafters import drafter_of
from domino_spec.evaluation import Protocol, measure_decoded, measure_simulated
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training import TrainConfig, World, prepare, train

CANDIDATES = 32
_KEPT = ("loss", "run_length", "grad_norm", "seconds_per_step", "training_seconds",
         "tokens_per_cycle", "tokens_per_cycle_head_off")  # fmt: skip


class Log:
    """Keeps a run's reports and prints what matters of them."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def report(self, step: int, values: dict[str, Any]) -> None:
        """A few steps, or an evaluation."""
        self.reports.append({"step": step, **values})
        print(f"  {self.short()[-1]}", flush=True)

    def close(self) -> None:
        """Nothing is open."""

    def short(self) -> list[dict[str, Any]]:
        """What a record holds of the reports."""
        return [
            {"step": report["step"], **{n: round(report[n], 4) for n in _KEPT if n in report}}
            for report in self.reports
        ]

    def mean(self, name: str) -> float:
        """Of the reports after the first, which waited for the compiler."""
        values = [report[name] for report in self.reports if name in report]
        values = values[1:] or values
        return float(sum(values) / len(values))


@dataclass(frozen=True)
class Trained:
    """A run's result."""

    drafter: DraftModule
    config: TrainConfig
    log: Log
    steps: int
    seconds: float


def train_one(settings: dict[str, Any], loaded: LoadedTarget, corpus: Corpus, out: Path) -> Trained:
    """One run into a folder."""
    log = Log()
    config = TrainConfig.from_dict({**settings, "out": str(out)})
    world = World(device=default_device())
    run = prepare(config, world=world, loaded=loaded, corpus=corpus, observers=[log])
    outcome, _ = train(run)
    return Trained(run.drafter.eval(), run.config, log, outcome.step, run.trainer.budget.seconds)


def measure(drafter: DraftModule, loaded: LoadedTarget, sets: Sets) -> dict[str, Any]:
    """Acceptance lengths by set: with all tokens, with the best candidates, with the head off."""
    if not isinstance(drafter, DraftModel):
        decoder = DominoDecoder(loaded.target, drafter_of(drafter), tokenizer=loaded.tokenizer)
        decoded = [
            measure_decoded(decoder, prompts, Protocol(max_new_tokens=answers.max_new_tokens))
            for prompts, answers in sets
        ]
        return {one.prompts.name: {"on": round(one.total.tokens_per_cycle, 4)} for one in decoded}
    ways: dict[str, tuple[int | None, bool]] = {"on": (None, True)}
    if drafter.head is not None:
        ways |= {"candidates": (CANDIDATES, True), "off": (None, False)}
    found: dict[str, Any] = {prompts.name: {} for prompts, _ in sets}
    for way, (candidates, head) in ways.items():
        decoder = DominoDecoder(
            loaded.target, drafter, tokenizer=loaded.tokenizer, candidates=candidates
        )
        for prompts, answers in sets:
            measured = measure_simulated(
                decoder, prompts, Protocol(), answers, head=head,
                sequences_per_forward=32, max_slots=32768,
            )  # fmt: skip
            found[prompts.name][way] = round(measured.total.tokens_per_cycle, 4)
    return found


@dataclass(frozen=True)
class Sweep:
    """A plan, and what all of its runs share."""

    plan: dict[str, Any]
    arguments: argparse.Namespace
    loaded: LoadedTarget
    corpus: Corpus
    sets: Sets

    def run(self, run: dict[str, Any]) -> None:
        """Train, measure, put on record."""
        own, base = run.get("settings", {}), self.plan.get("base", {})
        seconds = run.get("seconds", self.plan.get("seconds"))
        record = {
            "plan": self.arguments.plan.name, "target": Path(self.arguments.target).name,
            "name": run["name"], "settings": own, "base": base, "seconds": seconds,
            **({"tried": run["tried"]} if "tried" in run else {}),
        }  # fmt: skip
        settings = {
            "target": self.arguments.target, "data": self.arguments.data, "eval_every": 0,
            "save_every": 0, **base, **own, "max_seconds": seconds,
        }  # fmt: skip
        print(f"{run['name']}: {own}", flush=True)
        try:
            with tried(run.get("tried")):
                record |= self._trained(run["name"], settings)
        except Exception:
            record["failed"] = traceback.format_exc()[-2000:]
            traceback.print_exc()
        append_record(self.arguments.out, {**record, "environment": environment()})

    def _trained(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            keep = self.arguments.keep
            out = keep / name if keep else Path(folder)
            trained = train_one(settings, self.loaded, self.corpus, out)
            found = measure(trained.drafter, self.loaded, self.sets)
        took = time.perf_counter() - began
        print(f"{name}: {trained.steps} steps, {took:.0f} s in all: {found}", flush=True)
        return {
            "steps": trained.steps,
            "seconds_per_step": round(trained.seconds / trained.steps, 4),
            "parameters": sum(p.numel() for p in trained.drafter.parameters()),
            "acceptance_length": found,
            "reports": trained.log.short(),
        }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--continuations", help="folder of the target's answers; kept there")
    parser.add_argument("--limit", type=int, default=0, help="prompts a set")
    parser.add_argument("--only", nargs="+", help="names of the runs to do")
    parser.add_argument("--deadline", type=float, help="begin no run later than this (time.time)")
    parser.add_argument("--keep", type=Path, help="folder for the runs' folders")
    parser.add_argument("--out", type=Path, default=Path("records/recipe.jsonl"))
    return parser.parse_args()


def main() -> None:
    """Every run of the plan, one record each."""
    arguments = parse()
    torch._dynamo.config.recompile_limit = 64
    plan = yaml.safe_load(arguments.plan.read_text(encoding="utf-8"))
    device = default_device()
    loaded = load_target(
        arguments.target, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None
    )
    corpus = load_corpus(
        arguments.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
    )
    sets = load_sets(arguments.sets, arguments.continuations, loaded, arguments.limit)
    held_out = plan["base"].get("held_out", TrainConfig.model_fields["held_out"].default)
    sets.append(held_out_set(corpus, loaded, int(held_out), arguments.continuations))
    sweep = Sweep(plan=plan, arguments=arguments, loaded=loaded, corpus=corpus, sets=sets)
    for run in plan["runs"]:
        if arguments.only and run["name"] not in arguments.only:
            continue
        if arguments.deadline and time.time() > arguments.deadline:
            print(f"{run['name']}: not begun, the deadline has passed", flush=True)
            continue
        sweep.run(run)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
