"""What verify lengths by sequence are worth: the same requests with them, without, and plainly.

    python -m benchmarks.verify_lengths TARGET --draft DRAFTER --prompts FILES... --batch 8 32 64

Engines of one target take turns, round by round, over the same prompts; as many sequences run at a
time as the batch says. All choose their drafts cycle by cycle by costs. The first round is not
counted: it captures graphs, and acceptance is learnt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import end_tokens
from domino_spec.bench.tasks import read_tasks
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.engine.engine import Engine
from domino_spec.records import append_record, environment

WAYS = ("plain", "equal lengths", "lengths by sequence")


def run(engine: Engine, way: str, prompts: Sequence[Sequence[int]], how: SamplingParams,
        eos: Sequence[int]) -> dict[str, Any]:  # fmt: skip
    """One round: its tokens a second, and what was verified and accepted."""
    start = time.perf_counter()
    found = engine.generate(prompts, how, eos=eos, speculate=way != "plain")
    seconds = time.perf_counter() - start
    counts = AcceptanceStats.sum(sequence.stats for sequence in found)
    tokens = sum(len(sequence.output) for sequence in found)
    return {
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "acceptance_length": round(counts.tokens_per_cycle, 4),
        "drafts_per_cycle": round(sum(counts.offered) / max(counts.cycles, 1), 4),
    }


def main() -> None:
    """One record for each batch size and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("-t", "--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=64, help="Prompts a set.")
    parser.add_argument("--waves", type=int, default=3, help="Prompts a round, in batches.")
    parser.add_argument("--longest", type=int, default=512, help="Tokens of a prompt, at most.")
    parser.add_argument("--out", type=Path, default=Path("records/verify-lengths.jsonl"))
    options = parser.parse_args()
    decoder = DominoDecoder.from_pretrained(options.target, options.draft)
    target, tokenizer, drafter = decoder.target, decoder.tokenizer, decoder.drafter
    assert tokenizer is not None
    tasks = read_tasks(list(map(str, options.prompts)), limit=options.limit)
    sets = [task.encoded(tokenizer, longest=options.longest).prompts for task in tasks]
    ids = [list(prompt) for group in itertools.zip_longest(*sets) for prompt in group if prompt]
    eos = end_tokens(target, tokenizer)
    for batch in options.batch:
        room: dict[str, Any] = {"slots": batch, "capacity": options.longest + options.tokens}
        with_lengths = Engine(target, drafter, adaptive=True, **room)
        without = Engine(target, drafter, adaptive=True, lengths=False, **room)
        engines = dict(zip(WAYS, (without, without, with_lengths), strict=True))
        prompts = (ids * (1 + options.waves * batch // len(ids)))[: options.waves * batch]
        for temperature in options.temperature:
            how = SamplingParams(max_new_tokens=options.tokens, temperature=temperature)
            rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for way, engine in engines.items():
                engine.capture(batch, how, speculate=way != "plain")
            for turn in range(1 + options.rounds):
                for way, engine in engines.items():
                    found = run(engine, way, prompts, how, eos)
                    if turn:
                        rounds[way].append(found)
            record = {
                "target": Path(options.target).stem,
                "drafter": Path(options.draft).name,
                "batch": batch,
                "temperature": temperature,
                "new_tokens": options.tokens,
                "prompts": len(prompts),
                "sets": [path.stem for path in options.prompts],
                "dtype": str(target.dtype).removeprefix("torch."),
                "rounds": rounds,
                "environment": environment(),
            }
            append_record(options.out, record)
            print(batch, temperature, json.dumps(rounds), flush=True)
        del with_lengths, without, engines
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
