"""Offline generation: many prompts through the engine at once, tokens per second.

python -m benchmarks.offline path/to/target --sequences 512 --new-tokens 256 --temperature 0.7
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

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
    parser.add_argument("--out", type=Path, default=Path("records/offline.jsonl"))
    options = parser.parse_args(arguments)
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
    append_record(options.out, record)
    print(f"{tokens / min(seconds):,.0f} tokens/s")


def _target(name: str, dtype: torch.dtype) -> Target:
    if name in SHAPES:
        return random_target(name, device=default_device(), dtype=dtype)
    return load_target(name, dtype=dtype).target


if __name__ == "__main__":
    main()
