"""Trains a drafter of every kind on the same data for the same seconds, and packs it to travel.

    python -m benchmarks.head_to_head_train --target TARGET --data SHARDS... --seconds 200 \\
        --search-seconds 20 --rates medusa=1e-3,3e-3 --set gamma=7 eagle3:intermediate_size=6144

A kind with several rates tries each for the shorter time and goes on with the one that gives most
tokens a cycle on one half of the held-out conversations; the other half measures the full run.
Seconds are those of training alone: the compiler, evaluations and files are not counted. All but
the kind, its rate and its own settings is shared. A trained drafter leaves as KIND.tar, or where
that is larger than `--part-bytes` as KIND.tar.0, KIND.tar.1 ...: `cat KIND.tar.* | tar x`.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweep import Trained, train_one
from benchmarks.sweep_sets import held_out_set
from domino_spec.api import DominoDecoder
from domino_spec.checkpoints import load_drafter, save_packed
from domino_spec.data import Corpus, load_corpus
from domino_spec.decoding import AcceptanceStats
from domino_spec.drafter import DraftModel, DraftModule
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.evaluation import Continuations, Protocol, simulate
from domino_spec.evaluation.runs import greedy_counts
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training.config import (
    BASELINES,
    CONFIG_FILE,
    TrainConfig,
    parse_assignments,
)
from domino_spec.training.observers import LOG_FILE

KINDS = ("domino", "dflash", "markov", "medusa", "eagle3", "lookup")
RATES = {
    "domino": (5e-4, 1e-3, 2e-3),
    "dflash": (5e-4, 1e-3, 2e-3),
    "markov": (5e-4, 1e-3, 2e-3),
    "medusa": (5e-4, 1e-3, 3e-3),
    "eagle3": (5e-4, 1e-3, 2e-3),
}
PART_BYTES = 15 * 10**6
_NOT_RECORDED = ("target", "data", "out")


@dataclass
class Contest:
    """What all kinds share: the target, the data, and two halves of what is held out."""

    arguments: argparse.Namespace
    loaded: LoadedTarget
    corpus: Corpus
    search: Continuations
    final: Continuations

    def settings(self, kind: str) -> dict[str, Any]:
        """A kind's settings other than its rate and its seconds."""
        own = {"eval_every": 0, "save_every": 0, "variant": kind}
        own |= {"target": self.arguments.target, "data": self.arguments.data}
        for change in self.arguments.set:
            of, colon, assignment = change.partition(":")
            if colon and "=" not in of:
                own |= parse_assignments([assignment]) if of == kind else {}
            else:
                own |= parse_assignments([change])
        if kind in BASELINES:  # neither has a mask, which block drafters may be given
            own.pop("mask_token_id", None)
        return own

    def train(
        self, kind: str, *, rate: float, seconds: float, out: Path
    ) -> tuple[DraftModule, dict[str, Any]]:
        """One run, and what the record says of it."""
        budget = {"max_seconds": seconds, "learning_rate": rate}
        print(f"{kind}: {seconds:g} s at {rate:g}", flush=True)
        settings = {**self.settings(kind), **budget}
        trained = train_one(settings, self.loaded, self.corpus, out)
        return trained.drafter, _recorded(kind, trained)

    def measure(
        self, drafter: DraftModule | LookupDrafter, continuations: Continuations
    ) -> AcceptanceStats:
        """Greedy tokens a cycle: simulated for block drafters, which is the same, else decoded."""
        target = self.loaded.target
        if isinstance(drafter, DraftModel):
            return simulate(
                drafter, target, continuations, sequences_per_forward=32, max_slots=32768
            ).total
        opened = drafter_of(drafter) if isinstance(drafter, torch.nn.Module) else drafter
        return greedy_counts(
            DominoDecoder(target, opened, self.loaded.tokenizer, depth=opened.depth),
            continuations.prompts,
            max_new_tokens=continuations.max_new_tokens,
            batch_size=self.arguments.batch,
        )

    def record(self, stage: str, values: dict[str, Any], **measured: AcceptanceStats) -> None:
        """Write it down and say it."""
        found = {name: stats.to_dict() for name, stats in measured.items()}
        prompts = self.search if stage == "search" else self.final
        append_record(
            self.arguments.records,
            {
                "stage": stage,
                **values,
                "held_out_prompts": len(prompts.prompts),
                "held_out_tokens": prompts.max_new_tokens,
                **found,
                "environment": environment(),
            },
        )
        rates = ", ".join(f"{name} {s.tokens_per_cycle:.3f}" for name, s in measured.items())
        print(f"{values['kind']}, {stage}: {rates} tokens a cycle", flush=True)

    def run(self, kind: str, rates: Sequence[float]) -> None:
        """Search, train, pack, measure what was packed."""
        if kind == "lookup":
            self.record("full", {"kind": kind}, held_out=self.measure(LookupDrafter(), self.final))
            return
        rate = self.best(kind, rates) if len(rates) > 1 else rates[0]
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "run"
            seconds = self.arguments.seconds
            drafter, values = self.train(kind, rate=rate, seconds=seconds, out=out)
            trained = self.measure(drafter, self.final)
            kept, size = self.pack(kind, out)
            self.record(
                "full", {**values, **size}, held_out=trained, packed=self.measure(kept, self.final)
            )

    def best(self, kind: str, rates: Sequence[float]) -> float:
        """The rate of the best short run."""
        found = {}
        for rate in rates:
            with tempfile.TemporaryDirectory() as scratch:
                seconds = self.arguments.search_seconds
                drafter, values = self.train(
                    kind, rate=rate, seconds=seconds, out=Path(scratch) / "run"
                )
            measured = self.measure(drafter, self.search)
            self.record("search", values, held_out=measured)
            found[rate] = measured.tokens_per_cycle
        return max(found, key=lambda rate: found[rate])

    def pack(self, kind: str, run: Path) -> tuple[DraftModule, dict[str, int]]:
        """Pack a run's drafter with its log and settings; the drafter as it will be at home."""
        target = self.loaded.target
        packed = run / kind
        found = load_drafter(run / "drafter", dtype=torch.float32, any_kind=True)
        save_packed(found.drafter, packed, bits=self.arguments.bits, provenance=found.provenance)
        for name in (LOG_FILE, CONFIG_FILE):
            shutil.copyfile(run / name, packed / name)
        archive(packed, self.arguments.keep, limit=self.arguments.part_bytes)
        again = load_drafter(packed, dtype=target.dtype, any_kind=True).drafter
        size = sum(path.stat().st_size for path in packed.glob("*.safetensors"))
        return again.to(target.device), {"bits": self.arguments.bits, "packed_bytes": size}


def archive(folder: Path, out: Path, *, limit: int) -> list[Path]:
    """FOLDER as out/FOLDER.tar, in parts where it is larger than `limit`."""
    out.mkdir(parents=True, exist_ok=True)
    whole = out / f"{folder.name}.tar"
    with tarfile.open(whole, "w") as tar:
        tar.add(folder, arcname=folder.name)
    content = whole.read_bytes()
    if len(content) <= limit:
        return [whole]
    whole.unlink()
    parts = []
    for number, start in enumerate(range(0, len(content), limit)):
        parts.append(whole.with_name(f"{whole.name}.{number}"))
        parts[-1].write_bytes(content[start : start + limit])
    return parts


def _recorded(kind: str, trained: Trained) -> dict[str, Any]:
    drafter, config, log = trained.drafter, trained.config, trained.log
    reports = [report for report in log.reports if "loss" in report]
    first, last = reports[0], reports[-1]
    return {
        "kind": kind,
        "seconds": config.max_seconds,
        "training_seconds": round(last["training_seconds"], 2),
        "steps": last["step"],
        "learning_rate": config.learning_rate,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "drafts": drafter.config.default_depth,
        "loss": {"first": first["loss"], "last": last["loss"]},
        "accuracy": last["accuracy"],
        "labels_per_second": round(log.mean("labels_per_second"), 1),
        "settings": {n: v for n, v in config.to_dict().items() if n not in _NOT_RECORDED},
    }


def halves(continuations: Continuations, prompts: int) -> tuple[Continuations, Continuations]:
    """Every other held-out conversation whose answer counts, at most `prompts` each."""
    counted = [
        i for i, answer in enumerate(continuations.answers) if Protocol().outcome(answer) == "used"
    ]
    # A model that only ever loops or says little must still be measured on something.
    counted = counted if len(counted) > 1 else list(range(len(continuations.answers)))
    one, two = counted[::2][:prompts], counted[1::2][:prompts]
    return continuations.select(one), continuations.select(two or one)


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=200.0, help="training of a full run")
    parser.add_argument("--search-seconds", type=float, default=20.0, help="of each rate's trial")
    parser.add_argument(
        "--rates",
        nargs="*",
        action="extend",
        default=[],
        metavar="KIND=RATE,...",
        help="one rate: no search",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        action="extend",
        default=[],
        metavar="[KIND:]NAME=VALUE",
        help="training settings",
    )
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts of each half")
    parser.add_argument("--tokens", type=int, default=128, help="longest held-out answer")
    parser.add_argument("--batch", type=int, default=32, help="prompts decoded together")
    parser.add_argument("--continuations", help="folder of the target's answers; kept there")
    parser.add_argument("--bits", type=int, default=6, choices=(8, 6, 4))
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES)
    parser.add_argument("--keep", type=Path, required=True, help="folder for KIND.tar")
    parser.add_argument("--records", type=Path, default=Path("records/head_to_head_train.jsonl"))
    return parser.parse_args(given)


def chosen_rates(stated: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The rates of every kind: those stated over the usual ones."""
    rates = dict(RATES)
    for entry in stated:
        kind, equals, values = entry.partition("=")
        if kind not in RATES or not equals:
            raise SystemExit(f"--rates {entry!r}: expected one of {', '.join(RATES)} and =RATE,...")
        rates[kind] = tuple(float(value) for value in values.split(","))
    return rates


def main() -> None:
    """Every kind in turn."""
    arguments = parse()
    torch._dynamo.config.recompile_limit = 64
    rates = chosen_rates(arguments.rates)
    device = default_device()
    loaded = load_target(
        arguments.target, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None
    )
    corpus = load_corpus(
        arguments.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
    )
    contest = Contest(arguments, loaded, corpus, *_held_out(arguments, loaded, corpus))
    failed = []
    for kind in arguments.kinds:
        try:
            contest.run(kind, rates.get(kind, ()))
        except Exception:  # the others' seconds are not lost with it
            traceback.print_exc()
            failed.append(kind)
    if failed:
        raise SystemExit(f"not trained: {', '.join(failed)}; the reasons are above.")


def _held_out(
    arguments: argparse.Namespace, loaded: LoadedTarget, corpus: Corpus
) -> tuple[Continuations, Continuations]:
    stated = parse_assignments(s for s in arguments.set if ":" not in s)
    held_out = int(stated.get("held_out", TrainConfig.model_fields["held_out"].default))
    _, answers = held_out_set(
        corpus, loaded, held_out, arguments.continuations, max_new_tokens=arguments.tokens
    )
    return halves(answers, arguments.prompts)


if __name__ == "__main__":
    main()
