"""Acceptance length and speedup of the same questions after 0 to 31K tokens of unrelated text.

    python -m benchmarks.long_context FILE.gguf --quantize keep --draft released:NAME \
        --questions gsm8k.jsonl humaneval.jsonl --window 256 --out records/long-context.jsonl

The text is the Python language reference that comes with Python, no paragraph twice. It is
an earlier turn of the conversation. The engine decodes each question greedily, without drafts and
with the drafter as its files say, then again with every `--window` in place of its layers' own; 0
is all of the context. The speedup is that of decoding, without the prefill.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.api.prompts import end_tokens
from domino_spec.data import is_loop
from domino_spec.decoding import AcceptanceStats, SamplingParams, Sequence
from domino_spec.drafters import BlockDrafter, open_drafter
from domino_spec.engine.engine import Engine
from domino_spec.evaluation.runs import make_sequence
from domino_spec.records import append_record, environment
from domino_spec.targets import LoadedTarget, default_device, load_target

SHORTEST = 32
"""Tokens of an answer; shorter ones say little and are left out."""
OWN = "own"
"""The window that the drafter's files say."""


def main() -> None:
    """Every context, then a record for each window over it."""
    args = options()
    torch.set_num_threads(args.threads)
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else None
    loaded = load_target(args.target, quantize=args.quantize, device=device, dtype=dtype)
    tokenizer = loaded.tokenizer
    questions = [
        (path.stem, json.loads(line)["turns"][0])
        for path in args.questions
        for line in path.read_text("utf-8").splitlines()[: args.limit]
    ]
    text = unrelated(tokenizer, max(args.context))
    room = max(args.context) + args.question_tokens + args.max_new_tokens
    for setting in (OWN, *args.window):
        drafter = opened(args.draft, loaded, setting)
        capacity = room + drafter.depth + drafter.lookahead
        engine = Engine(loaded.target, drafter, slots=1, capacity=capacity, reuse=True)
        for context in args.context:
            prompts = [
                (name, prompt(tokenizer, text[:context], question)) for name, question in questions
            ]
            record = {
                "target": Path(args.target).name,
                "quantize": args.quantize,
                "drafter": drafter.name,
                "way": "decoded",
                "window": drafter.window,
                "sliding_window": drafter.config.sliding_window,
                "depth": drafter.depth,
                "context": context,
                "max_new_tokens": args.max_new_tokens,
                **answered(
                    engine, prompts, args.max_new_tokens, end_tokens(loaded.target, tokenizer)
                ),
            }
            shown = ("window", "sliding_window", "context", "tokens_per_cycle", "speedup", "used")
            print(json.dumps({name: record.get(name) for name in shown}), flush=True)
            append_record(args.out, {**record, "environment": environment()})
        del engine


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--quantize")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--questions", nargs="+", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=4, help="questions of each file")
    parser.add_argument("--window", nargs="*", default=[], help="0 for all, or SIZE[:SINKS]")
    parser.add_argument("--context", nargs="+", type=int, default=[0, 1000, 2000, 4000, 7000])
    parser.add_argument("--question-tokens", type=int, default=800, help="the longest question")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def opened(source: str, loaded: LoadedTarget, setting: str) -> BlockDrafter:
    """The drafter with the window that a word of the command line says."""
    if setting == OWN:
        drafter = open_drafter(source, loaded)
    else:
        size, _, sinks = setting.partition(":")
        number = int(sinks) if sinks else None
        drafter = open_drafter(source, loaded, draft_window=int(size), draft_sinks=number)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def answered(
    engine: Engine, prompts: list[tuple[str, list[int]]], new_tokens: int, eos: set[int]
) -> dict[str, Any]:
    """What decoding these prompts counted, and each one's own numbers; loops are left out."""

    def decode(index: int, *, drafts: bool) -> tuple[Sequence, float]:
        """Alone; with the seconds from the first token to the last."""
        params = SamplingParams(max_new_tokens=new_tokens)
        sequence = make_sequence(index, prompts[index][1], params, eos=eos)
        sequence.speculate = drafts
        engine.add_request(sequence)
        while not sequence.output and engine.busy:
            engine.step()
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        return sequence, time.perf_counter() - began

    for drafts in (False, True):  # graphs are captured, kernels compiled
        decode(0, drafts=drafts)
    outcomes, used = [], []
    for index, (name, asked) in enumerate(prompts):
        plain, took_plain = decode(index, drafts=False)
        sequence, took = decode(index, drafts=True)
        outcome = "short" if len(sequence.output) < SHORTEST else "used"
        outcomes.append("loop" if is_loop(sequence.output) else outcome)
        if outcomes[-1] == "used":
            same = plain.output == sequence.output
            used.append((name, len(asked), sequence.stats, took_plain, took, same))
    if not used:
        return {"used": 0, "loops": outcomes.count("loop"), "short": outcomes.count("short")}
    names, lengths, stats, plains, drafted, equal = zip(*used, strict=True)
    return {
        "tokens_per_cycle": AcceptanceStats.sum(stats).tokens_per_cycle,
        "speedup": sum(plains) / sum(drafted),
        "same_text": sum(equal),
        "seconds": {"plain": plains, "drafts": drafted},
        "used": len(used),
        "loops": outcomes.count("loop"),
        "short": outcomes.count("short"),
        "per_prompt": {
            "set": names,
            "tokens": lengths,
            "committed": [each.committed for each in stats],
            "cycles": [each.cycles for each in stats],
        },
    }


def unrelated(tokenizer: Any, tokens: int) -> list[int]:
    """So many tokens of the language reference, topic by topic."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    paragraphs = dict.fromkeys(paragraph for text in topics for paragraph in text.split("\n\n"))
    found: list[int] = tokenizer("\n\n".join(paragraphs)[: 10 * tokens], add_special_tokens=False)[
        "input_ids"
    ]
    return found[:tokens]


def prompt(tokenizer: Any, text: list[int], question: str) -> list[int]:
    """The text as an earlier turn, then the question."""
    earlier = [
        {"role": "user", "content": tokenizer.decode(text)},
        {"role": "assistant", "content": "Thank you, I have read it."},
    ]
    chat = [*(earlier if text else []), {"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(encoded, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    main()
