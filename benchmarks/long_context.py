"""Acceptance length and speedup of the same questions after 0 to 31K tokens of unrelated text.

    python -m benchmarks.long_context FILE.gguf --draft run/drafter --window 0 \
        --drafts adaptive all --context 1000 4000 8000 16000 31000 --limit 8 --minutes 8 \
        --questions gsm8k.jsonl humaneval.jsonl mt-bench.jsonl --out records/long-context.jsonl

The text is the Python language reference that comes with Python, no paragraph twice. It is
an earlier turn of the conversation. Each question is decoded greedily on an engine without a
drafter and on one with it, with the window that the drafter's files say and then with every
`--window` in place of its layers' own; 0 is all of the context. The speedup is that of decoding,
without the prefill. Both engines get the same prompts in the same order and remember nothing else,
so that both prefill in the same shapes: otherwise texts may differ by that.

The same command goes on where it was stopped: it leaves out what it has recorded.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import sys
import time
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import torch

from domino_spec.api.prompts import end_tokens
from domino_spec.data import is_loop
from domino_spec.decoding import AcceptanceStats, SamplingParams, Sequence
from domino_spec.drafters import BlockDrafter, open_drafter
from domino_spec.engine.engine import Engine
from domino_spec.evaluation.runs import make_sequence
from domino_spec.records import append_record, environment, read_records
from domino_spec.targets import LoadedTarget, default_device, load_target

SHORTEST = 32
"""Tokens of an answer; shorter ones say little and are left out."""
OWN = "own"
"""The window that the drafter's files say."""
ADAPTIVE = "adaptive"


def main() -> None:
    """A record for each window, way to draft and context."""
    args = options()
    if args.max_new_tokens < SHORTEST:
        sys.exit(f"--max-new-tokens is {args.max_new_tokens}; answers count from {SHORTEST} on.")
    torch.set_num_threads(args.threads)
    device = default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else None
    loaded = load_target(args.target, quantize=args.quantize, device=device, dtype=dtype)
    target, tokenizer = loaded.target, loaded.tokenizer
    questions = [
        (path.stem, json.loads(line)["turns"][0])
        for path in args.questions
        for line in path.read_text("utf-8").splitlines()[: args.limit]
    ]
    text = unrelated(tokenizer, max(args.context))
    prompts = {
        context: [(name, prompt(tokenizer, text[:context], each)) for name, each in questions]
        for context in args.context
    }
    capacity = args.max_new_tokens + max(
        len(asked) for each in prompts.values() for _, asked in each
    )
    if capacity > (target.context_length or capacity):
        sys.exit(
            f"the longest prompt and its answer are {capacity} tokens and {target.name} was made "
            f"for {target.context_length}; leave out the longest --context."
        )
    size = {"slots": 1, "capacity": capacity, "reuse": True}
    where, began = environment(), time.monotonic()
    done = recorded(args.out, where)
    plain: Engine | None = None
    for setting, drafts in product((OWN, *args.window), args.drafts):
        adaptive = drafts == ADAPTIVE
        contexts = [each for each in args.context if (setting, adaptive, each) not in done]
        if not contexts:
            continue
        plain = plain or captured(Engine(target, **size))
        drafter = opened(args.draft, loaded, setting)
        engine = captured(Engine(target, drafter, adaptive=adaptive, **size))
        for context in contexts:
            if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
                sys.exit(f"{args.minutes:g} minutes are over; the same command does the rest.")
            record = {
                "target": Path(args.target).name,
                "quantize": args.quantize,
                "dtype": str(target.dtype).removeprefix("torch."),
                "drafter": drafter.name,
                "way": "decoded",
                "setting": setting,
                "window": drafter.window,
                "sliding_window": drafter.config.sliding_window,
                "depth": drafter.depth,
                "adaptive": adaptive,
                "context": context,
                "max_new_tokens": args.max_new_tokens,
                **answered(
                    plain,
                    engine,
                    prompts[context],
                    args.max_new_tokens,
                    end_tokens(target, tokenizer),
                ),
            }
            shown = ("setting", "adaptive", "context", "tokens_per_cycle", "speedup", "same_text",
                     "used")  # fmt: skip
            took = {"seconds": round(time.monotonic() - began)}
            print(json.dumps({name: record.get(name) for name in shown} | took), flush=True)
            append_record(args.out, {**record, "environment": where})
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
    parser.add_argument(
        "--drafts", nargs="+", choices=(ADAPTIVE, "all"), default=[ADAPTIVE],
        help="adaptive: as many as pay, as served; all: the whole block in every cycle",
    )  # fmt: skip
    parser.add_argument("--context", nargs="+", type=int, default=[0, 1000, 2000, 4000, 7000])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, help="after which no record is begun")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def recorded(out: Path, where: dict[str, Any]) -> set[tuple[str, bool, int]]:
    """Setting, adaptive and context of what the same command has recorded on this machine."""

    def origin(environment: dict[str, Any]) -> tuple[str, str, str]:
        commit = environment["commit"].removesuffix("+changes")  # the records may be tracked
        return environment["command"], commit, environment["hardware"]

    return {
        (each["setting"], each["adaptive"], each["context"])
        for each in (read_records(out) if out.exists() else [])
        if "setting" in each and origin(each["environment"]) == origin(where)
    }


def captured(engine: Engine) -> Engine:
    """With all its graphs, where it has any."""
    engine.capture(1, SamplingParams())
    return engine


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
    plain: Engine,
    engine: Engine,
    prompts: list[tuple[str, list[int]]],
    new_tokens: int,
    eos: Collection[int],
) -> dict[str, Any]:
    """What decoding these prompts counted, and each one's own numbers; loops are left out."""

    def decode(engine: Engine, index: int) -> tuple[Sequence, int, float]:
        """Alone; with the tokens after its prefill and their seconds."""
        params = SamplingParams(max_new_tokens=new_tokens)
        sequence = make_sequence(index, prompts[index][1], params, eos=eos)
        engine.add_request(sequence)
        while not sequence.output and engine.busy:
            engine.step()
        began, before = time.perf_counter(), len(sequence.output)
        while engine.busy:
            engine.step()
        return sequence, len(sequence.output) - before, time.perf_counter() - began

    for each in (plain, engine):  # what the prompts share is computed, by both in the same chunks
        each.forget()
        decode(each, 0)
    outcomes, used = [], []
    for index, (name, asked) in enumerate(prompts):
        expected, *paced_plain = decode(plain, index)
        sequence, *paced = decode(engine, index)
        outcome = "short" if len(sequence.output) < SHORTEST else "used"
        outcomes.append("loop" if is_loop(sequence.output) else outcome)
        if outcomes[-1] == "used":
            same = expected.output == sequence.output
            reused = (expected.cached, sequence.cached)
            used.append((name, len(asked), sequence.stats, paced_plain, paced, same, reused))
    if not used:
        return {"used": 0, "loops": outcomes.count("loop"), "short": outcomes.count("short")}
    names, lengths, stats, plains, drafted, equal, reused = zip(*used, strict=True)
    total = AcceptanceStats.sum(stats)
    tokens_plain, seconds_plain = zip(*plains, strict=True)
    tokens, seconds = zip(*drafted, strict=True)
    pace_plain, pace = sum(tokens_plain) / sum(seconds_plain), sum(tokens) / sum(seconds)
    return {
        "tokens_per_cycle": total.tokens_per_cycle,
        "drafts_per_cycle": sum(total.offered) / total.cycles,
        "speedup": pace / pace_plain,
        "same_text": sum(equal),
        "seconds": {"plain": seconds_plain, "drafts": seconds},
        "used": len(used),
        "loops": outcomes.count("loop"),
        "short": outcomes.count("short"),
        "per_prompt": {
            "set": names,
            "tokens": lengths,
            "reused": reused,
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
    if len(found) < tokens:
        sys.exit(
            f"the language reference is {len(found)} tokens, {tokens} are asked for; no paragraph "
            "comes twice, so leave out the longest --context."
        )
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
