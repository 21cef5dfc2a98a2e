"""Throughput of vLLM with Domino and without, at several concurrencies, in one run.

    python -m benchmarks.vllm_throughput TARGET.gguf --sets gsm8k.jsonl --ours
    python -m benchmarks.vllm_throughput qwen3-8b --force 7.17 4.2

All engines are built first, each in a process of its own; then they take turns, one load at a time,
so that each has the card to itself and every concurrency is measured side by side. Prompts whose
plain answers loop are left out. A shape has random weights and its acceptance is forced, by vLLM's
own synthetic rejection sampling, to so many tokens a cycle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_folders import (
    METHODS,
    write_draft,
    write_draft_shape,
    write_shape,
    write_target,
)
from domino_spec.api import DominoDecoder
from domino_spec.bench.tasks import read_tasks
from domino_spec.engine.shapes import SHAPES
from domino_spec.evaluation import PromptSet, Protocol, measure_decoded
from domino_spec.records import append_record, environment
from domino_spec.targets import load_target

PLAIN = "plain"
BLOCK = 16
FEWEST = 12
"""Requests of a load, at least."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One engine of the comparison."""

    name: str
    speculative: dict[str, Any] | None = None


class Engine:
    """A worker process and the line to it."""

    def __init__(self, variant: Variant, settings: dict[str, Any], logs: Path) -> None:
        self.variant = variant
        self._log = logs / f"{variant.name.replace(' ', '-')}.log"
        environ = os.environ | {"VLLM_CACHE_ROOT": str(logs / f"cache-{self._log.stem}")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=environ,
        )
        self._send(settings | {"speculative_config": variant.speculative})
        self.start: dict[str, Any] = {}

    def wait(self) -> bool:
        """Whether it came up; if not, its last words."""
        try:
            self.start = self._answer()
        except RuntimeError as error:
            print(f"{self.variant.name} did not start: {error}", flush=True)
            return False
        print(f"{self.variant.name} is up: {self.start}", flush=True)
        return True

    def run(self, **job: Any) -> dict[str, Any]:
        """One load."""
        self._send(job)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, values: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(values) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._log.read_text()[-8000:])
        found: dict[str, Any] = json.loads(line)
        return found


def variants(options: argparse.Namespace, folder: Path) -> list[Variant]:
    """Plain decoding, then each method, with each forced acceptance where weights are random."""
    found = [Variant(name=PLAIN)]
    dtype = getattr(torch, options.dtype)
    for method in options.methods:
        place = folder / method
        if options.target in SHAPES:
            write_draft_shape(options.target, place, method=method)
        else:
            write_draft(options.draft, place, method=method, dtype=dtype)
        speculative: dict[str, Any] = {
            "method": method, "model": str(place),
            "num_speculative_tokens": BLOCK if method == "dspark" else BLOCK - 1,
        }  # fmt: skip
        if options.sampled_drafts and method == "dspark":
            speculative["draft_sample_method"] = "probabilistic"
        forced: Sequence[float | None] = options.force or [None]
        for length in forced:
            if length is None:
                found.append(Variant(name=method, speculative=speculative))
                continue
            synthetic = {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": length,
            }
            found.append(Variant(name=f"{method} {length}", speculative=speculative | synthetic))
    return found


def prompts_for(options: argparse.Namespace, target: Path) -> dict[str, PromptSet]:
    """Tokenised prompts by set; random ones for a shape."""
    if options.target in SHAPES:
        generator = torch.Generator().manual_seed(0)
        size = (128, options.prompt_tokens)
        rows = torch.randint(0, SHAPES[options.target]["vocab_size"] - 1, size, generator=generator)
        return {"random": PromptSet.of("random", rows.tolist(), longest=options.prompt_tokens)}
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    longest = Protocol().longest_prompt
    tasks = read_tasks(options.sets, limit=options.limit)
    return {task.name: task.encoded(tokenizer, longest=longest) for task in tasks}


def without_loops(engine: Engine, prompts: PromptSet, tokens: int) -> PromptSet:
    """Only prompts that plain decoding answers at length and without repeating itself."""
    protocol = Protocol(max_new_tokens=tokens)
    result = engine.run(
        prompts=prompts.prompts, concurrency=32, tokens=tokens, temperature=0.0, answers=True
    )
    used = [i for i, a in enumerate(result["answers"]) if protocol.outcome(a) == "used"]
    return PromptSet(
        prompts.name,
        tuple(prompts.prompts[i] for i in used),
        tuple(prompts.numbers[i] for i in used),
        prompts.too_long,
    )


def loads(prompts: PromptSet, concurrency: int) -> list[tuple[int, ...]]:
    """Enough requests to keep the engine full for most of the time, over and over the prompts."""
    count = max(FEWEST, 4 * concurrency)
    return [prompts.prompts[i % len(prompts.prompts)] for i in range(count)]


def measure(
    engines: list[Engine], sets: dict[str, PromptSet], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every load on every engine, side by side."""
    made_up = options.target in SHAPES
    common = {"tokens": options.tokens, "ignore_eos": made_up}
    for engine in engines:  # graphs, caches, clocks
        some = next(iter(sets.values())).prompts[: max(options.concurrency)]
        engine.run(prompts=some, concurrency=len(some), **common | {"tokens": 32})
    plan = itertools.product(
        sets.values(), options.temperature, options.concurrency, range(options.rounds)
    )
    for prompts, temperature, concurrency, turn in plan:
        for engine in engines if turn % 2 == 0 else engines[::-1]:
            job = {"concurrency": concurrency, "temperature": temperature, **common}
            result = engine.run(prompts=loads(prompts, concurrency), **job)
            yield {
                "target": options.name or options.target,
                "variant": engine.variant.name,
                "speculative": _without_path(engine.variant.speculative),
                "set": prompts.name,
                "prompts": len(prompts.prompts),
                "round": turn,
                "dtype": options.dtype,
                **job,
                **engine.start,
                **result,
            }


def ours(
    options: argparse.Namespace, target: Path, sets: dict[str, PromptSet]
) -> Iterator[dict[str, Any]]:
    """Our own decoder on the same prompts, as vLLM's acceptance is held against it."""
    loaded = load_target(target, dtype=getattr(torch, options.dtype))
    decoder = DominoDecoder.from_pretrained(loaded, options.draft, depth=BLOCK - 1)
    for temperature, prompts in itertools.product(options.temperature, sets.values()):
        protocol = Protocol(temperature=temperature, max_new_tokens=options.tokens)
        found = measure_decoded(decoder, prompts, protocol, batch_size=32, accept="rejection")
        yield {
            "target": options.name or options.target,
            "variant": "ours",
            "dtype": options.dtype,
            **found.to_dict(),
            "temperature": temperature,
        }


def _without_path(speculative: dict[str, Any] | None) -> dict[str, Any] | None:
    return speculative and {name: v for name, v in speculative.items() if name != "model"}


def _line(record: dict[str, Any]) -> str:
    if record["variant"] == "ours":
        cycle, pace = record["tokens_per_cycle"], "         -"
    else:
        cycle = 1 + record["accepted"] / record["cycles"] if record["cycles"] else 1.0
        pace = f"{record['full_tokens'] / record['full_seconds']:10.1f}"
    return (
        f"{record['variant']:14} {record['set']:10} T={record['temperature']:<4g} "
        f"c={record.get('concurrency', 32):<3} {pace} tokens/s  {cycle:5.2f} a cycle  "
        f"{record['seconds']:6.1f} s in all"
    )


def main() -> None:
    """Build, measure, write records, print lines as they come."""
    options = _options()
    folder = Path(options.work).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    made_up = options.target in SHAPES
    target = folder / "target"
    if made_up:
        write_shape(options.target, target)
    elif not (target / "config.json").is_file():
        write_target(Path(options.target), target, dtype=getattr(torch, options.dtype))
    settings = {
        "model": str(target), "dtype": options.dtype, "max_model_len": 1024, "max_num_seqs": 32,
        "max_num_batched_tokens": 8192, "enable_prefix_caching": False, "seed": 0,
        "skip_tokenizer_init": True, **({"load_format": "dummy"} if made_up else {}),
        **json.loads(options.engine),
    }  # fmt: skip
    started = [Engine(v, settings, folder) for v in variants(options, folder)]
    engines = [engine for engine in started if engine.wait()]
    if not engines or engines[0].variant.name != PLAIN:
        sys.exit("plain decoding did not start: there is nothing to compare with.")
    try:
        sets = prompts_for(options, target)
        if not made_up:
            sets = {n: without_loops(engines[0], p, options.tokens) for n, p in sets.items()}
        _keep(measure(engines, sets, options), options.out)
    finally:
        for engine in started:
            engine.close()
    if options.ours:
        _keep(ours(options, target, sets), options.out)


def _keep(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write each down as it comes."""
    circumstances = environment()
    for record in records:
        append_record(path, record | {"environment": circumstances})
        print(_line(record), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help=f"a GGUF file, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--name", help="the target's name in the records")
    parser.add_argument("--draft", default="released:smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--sampled-drafts", action="store_true", help="under dspark")
    parser.add_argument("--force", nargs="+", type=float, help="tokens a cycle, for shapes")
    parser.add_argument("--sets", nargs="+", default=[], help="JSON lines of turns")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--limit", type=int, help="prompts a set")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens a request")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of random prompts")
    parser.add_argument("--ours", action="store_true", help="also our own decoder's acceptance")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="more of vLLM's arguments, as JSON")
    parser.add_argument("--work", default="build/vllm", help="folders and logs")
    parser.add_argument("--out", type=Path, default=Path("records/vllm.jsonl"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
