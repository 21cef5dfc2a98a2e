"""Trains several drafters alike but for one setting each, and measures all on the same prompts.

    python -m benchmarks.ablations PLAN.yaml --target TARGET --data SHARDS... --sets FILES...

A plan holds `base` settings and a list of `runs`, each with a name, its own `settings` and either
`seconds` (the steps that fit are found by a short trial), `steps`, or `steps_of` an earlier run.
`best_of` names earlier runs: the settings of the one that did best on held-out conversations are
taken over. Runs that say `keep` leave their drafter and log behind.
Tokens a cycle are simulated: exactly what greedy decoding would give.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import end_tokens
from domino_spec.checkpoints import save_drafter
from domino_spec.data import Corpus, load_corpus
from domino_spec.drafter import Drafter
from domino_spec.evaluation import (
    Continuations,
    PromptSet,
    Protocol,
    continue_prompts,
    measure_simulated,
)
from domino_spec.evaluation.prompts import encode_turns, read_turns
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training import TrainConfig, World, prepare, train
from domino_spec.training.evaluate import split_held_out

TRIAL_STEPS = 30
PART_BYTES = 15 * 10**6
HELD_OUT = "held-out"
Sets = list[tuple[PromptSet, Continuations]]


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
        """Of the reports behind the first, which waited for the compiler."""
        later = self.reports[1:] or self.reports
        return sum(r[name] for r in later) / len(later)


def train_one(
    settings: dict[str, Any], loaded: LoadedTarget, corpus: Corpus, out: Path
) -> tuple[Drafter, TrainConfig, Speed, float]:
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


def measure(drafter: Drafter, loaded: LoadedTarget, sets: Sets) -> dict[str, Any]:
    """Tokens a cycle on each set, head on and off."""
    decoder = DominoDecoder(loaded.target, drafter, tokenizer=loaded.tokenizer)
    found: dict[str, Any] = {}
    for prompts, continuations in sets:
        ways = {"on": True, "off": False} if drafter.head is not None else {"on": True}
        found[prompts.name] = {
            way: round(
                measure_simulated(
                    decoder, prompts, Protocol(), continuations, head=head, rows_per_forward=32,
                    max_slots=32768,
                ).total.tokens_per_cycle,
                4,
            )
            for way, head in ways.items()
        }  # fmt: skip
    return found


def load_sets(files: Sequence[str], folder: str | None, loaded: LoadedTarget, limit: int) -> Sets:
    """Prompts and the target's answers, made once."""
    sets = []
    eos = end_tokens(loaded.target, loaded.tokenizer)
    for file in files:
        longest = Protocol().longest_for(loaded.target)
        prompts = encode_turns(Path(file).stem, read_turns(file), loaded.tokenizer, longest=longest)
        if limit:
            prompts = PromptSet.of(prompts.name, prompts.prompts[:limit], longest=longest)
        kept = sorted(Path(folder).glob(f"{prompts.name}-*.npz")) if folder else []
        continuations = Continuations.load(kept[0]) if kept else None
        if continuations is not None and limit:
            continuations = continuations.select(range(len(prompts.prompts)))
        if continuations is None or continuations.prompts != prompts.prompts:
            continuations = continue_prompts(
                loaded.target,
                prompts.prompts,
                eos=eos,
                max_new_tokens=Protocol().max_new_tokens,
                batch_size=64,
            )
        sets.append((prompts, continuations))
    return sets


def held_out_set(
    corpus: Corpus, loaded: LoadedTarget, count: int
) -> tuple[PromptSet, Continuations]:
    """Prompts of the conversations that every run keeps from its training."""
    kept = split_held_out(corpus, TrainConfig.held_out)[1]
    prompts = [
        kept[i].tokens[: kept.first_supervised(i)].tolist()
        for i in range(min(count, len(kept)))
        if kept.first_supervised(i)
    ]
    eos = end_tokens(loaded.target, loaded.tokenizer)
    tokens = min(256, (loaded.target.context_length or 10**6) - max(map(len, prompts)))
    answers = continue_prompts(
        loaded.target, prompts, eos=eos, max_new_tokens=tokens, batch_size=64
    )
    return PromptSet.of(HELD_OUT, prompts, longest=10**6), answers


def split_files(folder: Path, limit: int) -> None:
    """Cut what is larger (one matrix can be) into pieces; `cat FILE.*` joins them again."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        if len(content) <= limit:
            continue
        for number, start in enumerate(range(0, len(content), limit)):
            path.with_name(f"{path.name}.{number}").write_bytes(content[start : start + limit])
        path.unlink()


def main() -> None:
    """Every run of the plan, one record each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--sets", nargs="*", default=[])
    parser.add_argument("--continuations", help="folder of the target's answers, made before")
    parser.add_argument("--held-out", type=int, default=0, help="conversations to measure on too")
    parser.add_argument("--limit", type=int, default=0, help="prompts a set")
    parser.add_argument("--out", type=Path, default=Path("records/ablations.jsonl"))
    parser.add_argument("--keep", type=Path, help="folder for the drafters of runs that say keep")
    arguments = parser.parse_args()
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
    if arguments.held_out:
        sets.append(held_out_set(corpus, loaded, arguments.held_out))
    steps_of: dict[str, int] = {}
    settings_of: dict[str, dict[str, Any]] = {}
    score_of: dict[str, float] = {}
    for number, entry in enumerate(plan["runs"]):
        began = time.perf_counter()
        own = dict(entry.get("settings", {}))
        if "best_of" in entry:
            if not arguments.held_out:
                raise SystemExit("best_of needs --held-out: there is nothing to choose by.")
            winner = max(entry["best_of"], key=lambda name: score_of[name])
            own = {**settings_of[winner], **own}
        settings_of[entry["name"]] = own
        settings = {
            "target": arguments.target, "data": arguments.data, "eval_every": 0, "save_every": 0,
            **plan.get("base", {}), **own,
        }  # fmt: skip
        print(f"{entry['name']}: {own}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if "seconds" in entry:
                rate = trial(settings, loaded, corpus, Path(folder) / "trial")
                steps = max(10, round(entry["seconds"] / rate))
            else:
                steps = entry.get("steps") or steps_of[entry["steps_of"]]
            steps_of[entry["name"]] = steps
            settings |= {"steps": steps, "log_every": max(1, steps // 8)}
            out = Path(folder) / "run"
            if entry.get("keep") and arguments.keep:
                out = arguments.keep / entry["name"]
            drafter, config, speed, seconds = train_one(settings, loaded, corpus, out)
            if entry.get("keep") and arguments.keep:
                save_drafter(
                    drafter, out / "parts", dtype=torch.bfloat16, max_shard_bytes=PART_BYTES
                )
                split_files(out / "parts", PART_BYTES)
        found = measure(drafter, loaded, sets)
        score_of[entry["name"]] = found.get(HELD_OUT, {}).get("on", 0.0)
        budget = {k: entry[k] for k in ("seconds", "steps", "steps_of") if k in entry}
        append_record(
            arguments.out,
            {
                "plan": arguments.plan.name,
                "number": number,
                "name": entry["name"],
                "budget": budget,
                "settings": own,
                "base": plan.get("base", {}),
                "steps": config.steps,
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
        total = time.perf_counter() - began
        took = f"{seconds:.0f} s of {total:.0f} s"
        print(f"{entry['name']}: {steps} steps, {took}: {found}", flush=True)
        del drafter


if __name__ == "__main__":
    main()
