"""The engine's greedy text against the model's own plain decoding, every difference judged.

    python -m benchmarks.engine_exactness TARGET --dtype bfloat16

Each text is read again by Transformers' forward, token by token (`domino_spec.audit`). It is also
held against the same engine's own text without a drafter: how often speculation changes a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from domino_spec.api.prompts import end_tokens
from domino_spec.audit import EngineWay, audit_greedy
from domino_spec.checkpoints import load_drafter
from domino_spec.decoding import SamplingParams
from domino_spec.drafters import drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.records import append_record, environment
from domino_spec.targets import load_target
from tests.smollm2.prompts import PROMPTS


def main() -> None:
    """One record for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft", default="released:smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 7])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("records/engine-exactness.jsonl"))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    loaded = load_target(options.target, dtype=dtype)
    target, tokenizer = loaded.target, loaded.tokenizer
    assert tokenizer is not None
    drafter = load_drafter(options.draft, dtype=dtype, device=target.device).drafter
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in PROMPTS
    ]
    eos = end_tokens(target, tokenizer)
    room = {"capacity": max(map(len, prompts)) + options.tokens}
    greedy = SamplingParams(max_new_tokens=options.tokens)
    alone = EngineWay(Engine(target, None, slots=1, **room)).write(prompts, greedy, eos=eos)
    for rows in options.rows:
        way = EngineWay(Engine(target, drafter_of(drafter), slots=rows, **room))
        found = audit_greedy(target, way, prompts, max_new_tokens=options.tokens, eos=eos)
        again = way.write(prompts, greedy, eos=eos)
        same = sum(a.tokens == b.tokens for a, b in zip(alone, again, strict=True))
        counts = found.to_dict()
        record = {
            "target": "SmolLM2-135M-Instruct",
            "drafter": Path(options.draft).name,
            "dtype": options.dtype,
            "rows": rows,
            "new_tokens": options.tokens,
            "same_as_engine_alone": same,
            **counts,
        }
        append_record(options.out, record | {"environment": environment()})
        print({key: record[key] for key in ("dtype", "rows", "same_as_engine_alone")}, end=" ")
        kinds = ("prompts", "tokens", "differing_prompts", "ties", "bugs", "unclear")
        print({key: counts[key] for key in (*kinds, "tokens_per_cycle")}, flush=True)


if __name__ == "__main__":
    main()
