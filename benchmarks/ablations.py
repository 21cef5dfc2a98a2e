"""Trains several drafters alike but for one setting each, and measures all on the same prompts.

    python -m benchmarks.ablations PLAN.yaml --target TARGET --data SHARDS... --sets FILES...

`ablation_plan` says what a plan holds. Trials find the seconds a step while nothing else
runs; with `--rates` they are kept, so that several processes (`--only` some runs each) can then
train side by side, each run with the steps its seconds would have bought it alone.
Tokens a cycle are simulated: exactly what greedy decoding would give.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation_plan import Entry, Plan, own_settings
from benchmarks.ablation_sets import HELD_OUT, Sets, held_out_set, load_sets
from domino_spec.api import DominoDecoder
from domino_spec.checkpoints import save_drafter
from domino_spec.data import Corpus, load_corpus
from domino_spec.drafter import DraftModel
from domino_spec.drafters.files import AnyDrafter
from domino_spec.evaluation import Protocol, measure_simulated
from domino_spec.records import append_record, environment, read_records
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training import TrainConfig, World, prepare, train

TRIAL_STEPS = 30
PART_BYTES = 15 * 10**6


class Speed:
    """Seconds a step, from the later reports of a run."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def report(self, step: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.reports.append({"step": step, **values})
            print(
                f"  step {step}: loss {values['loss']:.3f}, λ {values['lambda']:.2f}, run "
                f"{values['run_length']:.3f}, {values['conversations_per_second']:.0f} conv/s",
                flush=True,
            )
        else:
            print(f"  step {step}: {values}", flush=True)

    def close(self) -> None:
        pass

    def mean(self, name: str) -> float:
        """Of the reports after the first, which waited for the compiler."""
        later = self.reports[1:] or self.reports
        return sum(r[name] for r in later) / len(later)


def train_one(
    settings: dict[str, Any], loaded: LoadedTarget, corpus: Corpus, out: Path
) -> tuple[AnyDrafter, TrainConfig, Speed, float]:
    """One run; also how many seconds its steps took, evaluation and saving left out."""
    speed = Speed()
    config = TrainConfig.from_dict({**settings, "out": str(out)})
    device = default_device()
    run = prepare(
        config, world=World(device=device), loaded=loaded, corpus=corpus, observers=[speed]
    )
    train(run)
    seconds = sum(
        r["seconds_per_step"] * (r["step"] - before)
        for before, r in zip([0, *(r["step"] for r in speed.reports)], speed.reports, strict=False)
    )
    return run.drafter.eval(), run.config, speed, seconds


def trial(settings: dict[str, Any], loaded: LoadedTarget, corpus: Corpus, out: Path) -> float:
    """Seconds a step, once everything is compiled."""
    short = {
        **settings, "steps": TRIAL_STEPS, "log_every": TRIAL_STEPS // 3, "eval_every": 0,
        "save_every": 0,
    }  # fmt: skip
    _, _, speed, _ = train_one(short, loaded, corpus, out)
    return float(speed.reports[-1]["seconds_per_step"])


def measure(drafter: DraftModel, loaded: LoadedTarget, sets: Sets) -> dict[str, Any]:
    """Tokens a cycle on each set, head on and off."""
    decoder = DominoDecoder(loaded.target, drafter, tokenizer=loaded.tokenizer)
    found: dict[str, Any] = {}
    for prompts, continuations in sets:
        ways = {"on": True, "off": False} if drafter.head is not None else {"on": True}
        found[prompts.name] = {
            way: round(
                measure_simulated(
                    decoder, prompts, Protocol(), continuations, head=head,
                    sequences_per_forward=32, max_slots=32768,
                ).total.tokens_per_cycle,
                4,
            )
            for way, head in ways.items()
        }  # fmt: skip
    return found


def split_files(folder: Path, limit: int) -> None:
    """Cut what is larger (one matrix can be) into pieces; `cat FILE.*` joins them again."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        if len(content) <= limit:
            continue
        for number, start in enumerate(range(0, len(content), limit)):
            path.with_name(f"{path.name}.{number}").write_bytes(content[start : start + limit])
        path.unlink()


@dataclass
class Study:
    """A plan, and what all of its runs share."""

    plan: Plan
    arguments: argparse.Namespace
    loaded: LoadedTarget
    corpus: Corpus
    sets: Sets

    def settings(self, own: dict[str, Any]) -> dict[str, Any]:
        """All settings of a run but its budget."""
        shared = {"eval_every": 0, "save_every": 0, **self.plan.base}
        return {"target": self.arguments.target, "data": self.arguments.data, **shared, **own}

    def rates(self) -> dict[str, float]:
        """Seconds a step of the runs whose budget is seconds."""
        path: Path | None = self.arguments.rates
        if path is not None and path.exists():
            kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        found = {}
        for entry in self.plan.timed():
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                settings = self.settings(entry.settings)
                rate = trial(settings, self.loaded, self.corpus, Path(folder))
            found[entry.label] = rate
            took = time.perf_counter() - began
            print(f"trial of {entry.label}: {rate:.4f} s a step ({took:.0f} s)", flush=True)
        if path is not None:
            path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return found

    def run(self, entry: Entry, rates: dict[str, float]) -> None:
        """Train, measure, put on record."""
        began = time.perf_counter()
        arguments = self.arguments
        files = [f for f in (*arguments.earlier, arguments.out) if f.exists()]
        earlier = {record["label"]: record for f in files for record in read_records(f)}
        own = own_settings(entry, earlier, HELD_OUT)
        steps = self.plan.steps(entry, rates)
        print(f"{entry.label}: {steps} steps of {own}", flush=True)
        settings = {"log_every": max(1, steps // 8)} | self.settings(own) | {"steps": steps}
        with tempfile.TemporaryDirectory() as folder:
            keep = arguments.keep / entry.name if entry.keep and arguments.keep else None
            out = keep or Path(folder)
            drafter, config, speed, seconds = train_one(settings, self.loaded, self.corpus, out)
            assert isinstance(drafter, DraftModel), "baselines are compared by head_to_head_train"
            if keep is not None:
                parts = keep / "parts"
                save_drafter(drafter, parts, dtype=torch.bfloat16, max_shard_bytes=PART_BYTES)
                split_files(parts, PART_BYTES)
        found = measure(drafter, self.loaded, self.sets)
        append_record(
            arguments.out,
            {
                "plan": self.plan.name,
                "name": entry.name,
                "label": entry.label,
                "budget": entry.budget,
                "settings": own,
                "base": self.plan.base,
                "steps": config.steps,
                "seconds_a_step_alone": rates.get(entry.rate_of or entry.label),
                "training_seconds": round(seconds, 1),
                "conversations_per_second": round(speed.mean("conversations_per_second"), 1),
                "parameters": sum(p.numel() for p in drafter.parameters()),
                "loss": speed.reports[-1]["loss"],
                "accuracy": speed.reports[-1]["accuracy"],
                "run_length": speed.reports[-1]["run_length"],
                "tokens_per_cycle": found,
                "environment": environment(),
            },
        )
        took = f"{seconds:.0f} s of {time.perf_counter() - began:.0f} s"
        print(f"{entry.label}: {steps} steps, {took}: {found}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--continuations", help="folder of the target's answers; kept there")
    parser.add_argument("--limit", type=int, default=0, help="prompts a set")
    parser.add_argument("--rates", type=Path, help="file of the trials' seconds a step")
    parser.add_argument("--trials-only", action="store_true")
    parser.add_argument("--only", nargs="+", help="labels of the runs to do")
    parser.add_argument("--earlier", nargs="*", type=Path, default=[], help="records for best_of")
    parser.add_argument("--out", type=Path, default=Path("records/ablations.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for the drafters of runs that say keep")
    return parser.parse_args()


def main() -> None:
    """Every run of the plan, one record each."""
    arguments = parse()
    torch._dynamo.config.recompile_limit = 64
    plan = Plan.read(arguments.plan)
    device = default_device()
    loaded = load_target(
        arguments.target, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None
    )
    corpus = load_corpus(
        arguments.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
    )
    sets: Sets = []
    if not arguments.trials_only:
        sets = load_sets(arguments.sets, arguments.continuations, loaded, arguments.limit)
        held_out = int(plan.base.get("held_out", TrainConfig.model_fields["held_out"].default))
        sets.append(held_out_set(corpus, loaded, held_out, arguments.continuations))
    study = Study(plan=plan, arguments=arguments, loaded=loaded, corpus=corpus, sets=sets)
    rates = study.rates()
    if arguments.trials_only:
        return
    chosen = [plan.find(label) for label in arguments.only or []] or plan.entries
    for entry in chosen:
        study.run(entry, rates)


if __name__ == "__main__":
    main()
