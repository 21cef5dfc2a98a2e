"""Training speed: conversations a second, peak memory, share of the card's peak, where time goes.

    python -m benchmarks.training_speed TARGET --data SHARDS... --set labels=soft
    python -m benchmarks.training_speed qwen3-4b --steps 20 --set rows=4 length=3072 anchors=256

A name of `SHAPES` instead of a target means that shape with random weights and random data.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.training_flops import BF16_PEAK, step_flops
from domino_spec.data import Corpus, load_corpus, write_shard
from domino_spec.engine.shapes import SHAPES, random_target
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target
from domino_spec.training import Run, TrainConfig, World, prepare, train
from domino_spec.training.learning import Learning

STAGES = ("target", "backbone", "head", "loss", "backward", "optimiser")


class Watcher:
    """Keeps reports, and profiles a few steps in the middle, without a CUDA graph."""

    def __init__(self, *, first: int, last: int) -> None:
        self.reports: list[dict[str, Any]] = []
        self._first, self._last = first, last
        self.profiler: Any = None
        self.learn: Learning | None = None
        self._recorder: Any = None

    def report(self, step: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.reports.append({"step": step, **values})
            pace, loss = values["seconds_per_step"], values["loss"]
            print(f"step {step}: {pace:.4f} s a step, loss {loss:.3f}", flush=True)
        if step == self._first:
            assert self.learn is not None
            self._recorder, self.learn.recorder = self.learn.recorder, None
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.start()
        elif step == self._last and self.profiler is not None:
            self.profiler.stop()
            assert self.learn is not None
            self.learn.recorder = self._recorder

    def close(self) -> None:
        pass


def random_loaded(shape: str, device: torch.device) -> LoadedTarget:
    """A target of this shape with random weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_target(shape, device=device, dtype=dtype)
    return LoadedTarget(target=target, tokenizer=None, source=shape, revision=None)


def random_corpus(vocab_size: int, *, length: int, count: int) -> Corpus:
    """Conversations of random tokens, each as long as a row."""
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.npz"
        rows = generator.integers(0, vocab_size - 1, (count, length)).tolist()
        prompt = min(64, length // 4)
        write_shard(
            path,
            prompts=[row[:prompt] for row in rows],
            answers=[row[prompt:] for row in rows],
            vocab_size=vocab_size,
        )
        return load_corpus([str(path)], tokenizer=None, vocab_size=vocab_size)


def measure(
    run: Run, watcher: Watcher, *, soft: bool, prefetched: dict[str, Any]
) -> dict[str, Any]:
    """Train, and take the speed of the last quarter, after the profiled steps."""
    train(run)
    config, drafter = run.config, run.drafter
    later = watcher.reports[-1:]  # the report before it holds the capture of another graph
    mean = {
        name: float(np.mean([r[name] for r in later]))
        for name in ("conversations_per_second", "answer_tokens_per_second", "seconds_per_step",
                     "labels_per_second")
    }  # fmt: skip
    assert config.batch_size is not None
    assert config.length is not None
    assert config.anchors is not None
    flops = step_flops(
        run.trainer.learn.target,
        drafter,
        tokens=config.batch_size * config.length,
        slots=config.batch_size * config.anchors * config.block_size,
        labels=int(mean["labels_per_second"] * mean["seconds_per_step"]),
        soft=soft,
    )
    result = {
        **prefetched,
        **mean,
        "tokens_per_second": config.batch_size * config.length / mean["seconds_per_step"],
        "tera_operations_per_step": flops / 1e12,
        "stage_share": _stages(watcher.profiler),
        "rows": config.batch_size,
        "length": config.length,
        "anchors": config.anchors,
        "labels": config.labels,
        "optimizer": config.optimizer,
        "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
    }
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        result["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if name in BF16_PEAK:
            result["share_of_peak"] = flops / mean["seconds_per_step"] / BF16_PEAK[name]
    return result


def _stages(profiler: Any) -> dict[str, float]:
    """Each stage's share of the device's time; the backward pass covers backbone and head."""
    times = {}
    for event in profiler.key_averages():
        if event.key.startswith("step: "):
            spent = getattr(event, "device_time_total", 0) or event.cpu_time_total
            times[event.key.removeprefix("step: ")] = max(
                spent, times.get(event.key.removeprefix("step: "), 0)
            )
    total = sum(times.values()) or 1
    return {stage: round(times.get(stage, 0) / total, 4) for stage in STAGES}


def main() -> None:
    """One measurement, one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--data", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("records/training-speed.jsonl"))
    parser.add_argument("--kernels", type=int, default=0, help="print this many slowest kernels")
    parser.add_argument("--set", nargs="*", default=[], help="name=value of any training setting")
    arguments = parser.parse_args()
    import yaml

    changes = {n: yaml.safe_load(v) for n, _, v in (s.partition("=") for s in arguments.set)}
    device = default_device()
    made_up = arguments.target in SHAPES
    if made_up:
        loaded = random_loaded(arguments.target, device)
        corpus = random_corpus(
            loaded.target.vocab_size, length=int(changes.get("length", 1024)), count=64
        )
        changes.setdefault("mask_token_id", loaded.target.vocab_size - 1)
    else:
        loaded = load_target(
            arguments.target, device=device, dtype=torch.bfloat16 if device.type == "cuda" else None
        )
        corpus = load_corpus(
            arguments.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
        )
    quarter = arguments.steps // 4
    watcher = Watcher(first=quarter, last=quarter * 2)
    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig.from_dict(
            {
                "target": arguments.target, "data": arguments.data or ["random"], "out": out,
                "steps": arguments.steps, "log_every": quarter, "eval_every": 0, "save_every": 0,
                **changes,
            }
        )  # fmt: skip
        run = prepare(
            config, world=World(device=device), loaded=loaded, corpus=corpus, observers=[watcher]
        )
        watcher.learn = run.trainer.learn
        result = measure(
            run, watcher, soft=config.labels == "soft", prefetched={"target": loaded.target.name}
        )
    if arguments.kernels:
        print(watcher.profiler.key_averages().table(sort_by="self_device_time_total",
              row_limit=arguments.kernels, max_name_column_width=90))  # fmt: skip
    append_record(arguments.out, {**result, "environment": environment()})
    for name, value in result.items():
        print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
