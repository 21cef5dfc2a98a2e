"""Exactness on a GPU, where kernels round a block and single steps apart.

Compares greedy tokens with Transformers' own `generate` and proves every difference a near-tie
(`domino_spec.audit.greedy`): on the common prefix the two tokens' float32 logits are closer than
twice the largest difference at that position between single steps and the shapes that decoding
used. Anything else counts as unexplained.

    python -m benchmarks.gpu_exactness TARGET --dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from domino_spec.audit import Difference, Pass, ReferenceWay
from domino_spec.audit.forwards import PlainReader
from domino_spec.audit.greedy import judge
from domino_spec.decoding import AcceptanceStats, SamplingParams
from domino_spec.demo import untrained_drafter
from domino_spec.drafters import BlockDrafter
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, load_target
from tests.smollm2.prompts import PROMPTS
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.families import plain_greedy

DEPTH, NEW = 15, 64
SCRIPTED = {"oracle": Oracle, "good (4 in 5)": Good, "adversarial": Adversarial}


def measure(source: str, dtype: torch.dtype, path: Path) -> None:
    """All drafters at one and seven rows a batch, one record each."""
    loaded = load_target(source, dtype=dtype)
    target, tokenizer = loaded.target, loaded.tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in PROMPTS
    ]
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in prompts]
    for kind in ["none (plain)", *SCRIPTED, "random Domino, shift"]:
        for rows in (1, 7):
            counts = compare(target, kind, rows, prompts, answers)
            record = {
                "target": f"SmolLM2-135M-Instruct, {str(dtype).removeprefix('torch.')}",
                "drafter": kind,
                "rows": rows,
                "prompts": len(prompts),
                "new_tokens": NEW,
                **counts,
                "environment": environment(),
            }
            append_record(path, record)
            print(record["target"], kind, rows, counts, flush=True)


def compare(
    target: Any, kind: str, rows: int, prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, Any]:
    """How many prompts differ, how many of those are proven ties, and the tokens a cycle."""
    differing, ties, stats = 0, 0, AcceptanceStats()
    for first in range(0, len(prompts), rows):
        batch = slice(first, first + rows)
        if kind in SCRIPTED:
            proposer: Any = SCRIPTED[kind](answers[batch], depth=DEPTH, vocab=target.vocab_size)
        elif kind == "none (plain)":
            proposer = None
        else:
            proposer = BlockDrafter(untrained_drafter(target)).with_depth(DEPTH)
        way = ReferenceWay(target, proposer, batch_size=rows)
        written = way.write(prompts[batch], SamplingParams(max_new_tokens=NEW), eos=())
        for prompt, plain, text in zip(prompts[batch], answers[batch], written, strict=True):
            found = judge_first(target, prompt, plain, text.tokens, text.passes)
            differing += found is not None
            ties += found is not None and found.verdict == "tie"
            stats.add(text.stats)
    return {
        "differing_prompts": differing,
        "proven_ties": ties,
        "tokens_per_cycle": stats.tokens_per_cycle,
    }


def judge_first(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    found: Sequence[int],
    passes: Sequence[Pass],
) -> Difference | None:
    """The first difference of two known texts, measured; None if there is none."""
    pairs = enumerate(zip(plain, found, strict=True))
    place = next((index for index, (a, b) in pairs if a != b), None)
    if place is None:
        return None
    reader = PlainReader(target)
    single = reader.read(prompt)
    for token in plain[:place]:
        single = reader.read([token])
    ids = [*prompt, *plain[:place]]
    return judge(
        target, None, prompt=0, position=place, ids=ids, single=single, found=found[place],
        passes=passes,
    )  # fmt: skip


def main() -> None:
    """Measure in one type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--records", default="records")
    options = parser.parse_args()
    path = Path(options.records) / f"gpu_exactness_{options.dtype}.jsonl"
    path.unlink(missing_ok=True)
    measure(options.target, getattr(torch, options.dtype), path)


if __name__ == "__main__":
    main()
