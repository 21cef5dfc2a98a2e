"""Offline generation, tokens per second: the engine alone, or `domino data answer` of some trees.

python -m benchmarks.offline path/to/target --sequences 512 --new-tokens 256 --temperature 0.7
python -m benchmarks.offline path/to/target --sequences 32 --new-tokens 64 --dtype float32 \
    --answer old=path/to/old/tree --answer new=.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine.engine import Engine
from domino_spec.engine.shapes import SHAPES, random_target
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, default_device, load_target

_PROMPT = 64


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and append a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", help="a folder, a GGUF file, or a shape of engine.shapes")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="unset: records/offline.jsonl, or records/answer.jsonl"
    )
    parser.add_argument(
        "--answer", action="append", metavar="LABEL=TREE",
        help="run `domino data answer` of this source tree instead; several go in turns",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.answer:
        append_record(options.out or Path("records/answer.jsonl"), answer_record(options))
        return
    target = _target(options.target, getattr(torch, options.dtype))
    generator = torch.Generator().manual_seed(0)
    shape = (options.sequences, _PROMPT)
    prompts = torch.randint(3, target.vocab_size, shape, generator=generator).tolist()
    params = SamplingParams(
        max_new_tokens=options.new_tokens, temperature=options.temperature, seed=0, ignore_eos=True
    )
    engine = Engine(target, slots=options.sequences, capacity=_PROMPT + options.new_tokens)
    engine.generate(prompts, params)  # compiled and captured
    seconds = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        engine.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
    tokens = options.sequences * options.new_tokens
    record = {
        "target": Path(options.target).name,
        "sequences": options.sequences,
        "prompt_tokens": options.sequences * _PROMPT,
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "tokens_per_second": [tokens / spent for spent in seconds],
        "environment": environment(),
    }
    append_record(options.out or Path("records/offline.jsonl"), record)
    print(f"{tokens / min(seconds):,.0f} tokens/s")


def answer_record(options: argparse.Namespace) -> dict[str, Any]:
    """`domino data answer` of each tree in turns: tokens and seconds, the loading not counted."""
    trees = dict(entry.split("=", 1) for entry in options.answer)
    rates: dict[str, list[float]] = {label: [] for label in trees}
    runs: dict[str, list[dict[str, float]]] = {label: [] for label in trees}
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        prompts.write_text("\n".join(_prompts(options.sequences)) + "\n", encoding="utf-8")
        for turn in range(options.repeats):
            for label, tree in trees.items():
                out = Path(folder, f"{label}-{turn}")
                done = _answer(tree, prompts, out, options)
                rates[label].append(done["session_tokens"] / done["session_seconds"])
                names = ("session_seconds", "product_seconds", "cpu_seconds", "product_cpu_seconds")
                runs[label].append({name: done[name] for name in names if name in done})
                told = f"{label}: {rates[label][-1]:,.1f} tokens/s"
                if "product_seconds" in done:
                    share = done["product_seconds"] / done["session_seconds"]
                    cpu_share = done["product_cpu_seconds"] / done["cpu_seconds"]
                    told += (
                        f", {share:.0%} of the rate of its matrix products alone "
                        f"({cpu_share:.0%} in CPU time)"
                    )
                print(told, flush=True)
    return {
        "target": Path(options.target).name,
        "command": "domino data answer",
        "sequences": options.sequences,
        "new_tokens": options.new_tokens,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "tokens_per_second_by_tree": rates,
        "seconds_by_tree": runs,
        "load_average": os.getloadavg()[0],
        "environment": environment(),
    }


def _answer(tree: str, prompts: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    # Products are counted in the engine, which the first trees did not have.
    counted = Path(tree, "src", "domino_spec", "engine", "engine.py").exists()
    command = [
        sys.executable, "-m", "benchmarks.products" if counted else "domino_spec", "data", "answer",
        str(Path(options.target).resolve()), str(prompts), "--out", str(out),
        "-n", str(options.new_tokens),
        "-t", str(options.temperature), "--dtype", options.dtype, "--json", "--quiet",
    ]  # fmt: skip
    own = Path(__file__).parents[1]  # `benchmarks` of this tree, `domino_spec` of the other
    path = {**os.environ, "PYTHONPATH": f"{Path(tree, 'src').resolve()}{os.pathsep}{own}"}
    told = subprocess.run(command, env=path, cwd=out.parent, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def _prompts(count: int) -> list[str]:
    """Questions of several lengths; each asks for more than there is room for."""
    topics = ("the sea", "old trains", "bread", "a chess game", "winter", "prime numbers")
    detail = " Name the people, the places and the years, and say where you are not sure."
    return [
        f"Write a long story number {index} about {topics[index % len(topics)]}."
        + detail * (index % 4)
        for index in range(count)
    ]


def _target(name: str, dtype: torch.dtype) -> Target:
    if name in SHAPES:
        return random_target(name, device=default_device(), dtype=dtype)
    return load_target(name, dtype=dtype).target


if __name__ == "__main__":
    main()
