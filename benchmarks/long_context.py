"""Acceptance length and speedup of the same questions after 0 to 31K tokens of unrelated text.

    python -m benchmarks.long_context FILE.gguf --quantize keep --draft released:NAME \
        --questions gsm8k.jsonl humaneval.jsonl --window 256 --out records/long-context.jsonl

The text is the Python language reference that comes with Python, no paragraph twice. It is
an earlier turn of the conversation. The engine decodes each question greedily without drafts and
with the drafter as its files say; every `--window` is then simulated over the same answer and the
draft cache that decoding has left, so that all windows see the same numbers. The speedup is that
of decoding, without the prefill.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import torch

from domino_spec.data import is_loop
from domino_spec.decoding import AcceptanceStats, SamplingParams, Sequence
from domino_spec.drafter.masks import Window
from domino_spec.drafters import BlockDrafter, open_drafter
from domino_spec.engine.engine import Engine
from domino_spec.evaluation.runs import make_sequence
from domino_spec.evaluation.simulate import count_right, walk
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, default_device, load_target

SHORTEST = 32
"""Tokens of an answer; shorter ones say little and are left out."""
DECODED = "decoded"


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
    drafter = open_drafter(args.draft, loaded)
    assert isinstance(drafter, BlockDrafter)
    windows = {DECODED: None} | {setting: window_of(setting) for setting in args.window}
    own = drafter.config.sliding_window
    room = max(args.context) + args.question_tokens + args.max_new_tokens
    capacity = room + drafter.depth + drafter.lookahead
    engine = Engine(loaded.target, drafter, slots=1, capacity=capacity, reuse=True)
    for context in args.context:
        rows = []
        for index, (name, question) in enumerate(questions):
            asked = prompt(tokenizer, text[:context], question)
            params = SamplingParams(max_new_tokens=args.max_new_tokens)

            def made(drafts: bool) -> Sequence:
                eos = [tokenizer.eos_token_id]
                made = make_sequence(index, asked, params, eos=eos)  # noqa: B023
                made.speculate = drafts
                return made

            if not rows:  # graphs are captured, kernels compiled
                for drafts in (False, True):
                    decode(engine, made(drafts))
            plain, took_plain = decode(engine, made(False))
            sequence, took = decode(engine, made(True))
            answer = sequence.output
            outcome = "short" if len(answer) < SHORTEST else "used"
            outcome = "loop" if is_loop(answer) else outcome
            counts = {DECODED: sequence.stats}
            for setting in args.window if outcome == "used" else ():
                counts[setting] = simulated(
                    engine.drafter, loaded.target, asked, answer, windows[setting], args
                )
            speed = (took_plain, took, plain.output == answer)
            rows.append((name, len(asked), outcome, counts, speed))
        for setting, window in windows.items():
            record = {
                "target": Path(args.target).name,
                "quantize": args.quantize,
                "drafter": drafter.name,
                "way": DECODED if setting == DECODED else "simulated",
                "window": window,
                "sliding_window": own,
                "depth": drafter.depth,
                "context": context,
                "max_new_tokens": args.max_new_tokens,
                **counted(rows, setting, timed=setting == DECODED),
            }
            shown = ("way", "window", "context", "tokens_per_cycle", "speedup", "used", "loops")
            print(json.dumps({name: record.get(name) for name in shown}), flush=True)
            append_record(args.out, {**record, "environment": environment()})


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--quantize")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--questions", nargs="+", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=4, help="questions of each file")
    parser.add_argument("--window", nargs="*", default=[], help="0 for all, or SIZE:SINKS")
    parser.add_argument("--context", nargs="+", type=int, default=[0, 1000, 2000, 4000, 7000])
    parser.add_argument("--question-tokens", type=int, default=800, help="the longest question")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def window_of(setting: str) -> Window | None:
    """The window that a word of the command line says."""
    size, _, sinks = setting.partition(":")
    return Window(int(size), int(sinks or 0)) if int(size) else None


def decode(engine: Engine, sequence: Sequence) -> tuple[Sequence, float]:
    """Decode alone; with the seconds from the first token to the last."""
    engine.add_request(sequence)
    while not sequence.output and engine.busy:
        engine.step()
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    return sequence, time.perf_counter() - began


@torch.no_grad()
def simulated(
    drafter: Any,
    target: Target,
    asked: list[int],
    answer: list[int],
    window: Window | None,
    args: argparse.Namespace,
) -> AcceptanceStats:
    """What decoding this answer with this window counts, over what is in the draft cache."""
    model, depth, anchors = drafter.model, drafter.depth, len(answer) - 1
    length = len(asked) + anchors
    keys, values = (states[:, :1, :, :length] for states in drafter.cache.layers)
    here: dict[str, Any] = {"device": keys.device}
    tokens = torch.tensor([answer[:anchors]], **here)  # [1, anchors]
    model.backbone.draft_window = window
    hidden = model.draft_hidden(
        target,
        anchor_tokens=tokens,
        anchors=len(asked) + torch.arange(anchors, **here).unsqueeze(0),
        context=list(zip(keys, values, strict=True)),
        context_positions=torch.arange(length, **here).unsqueeze(0),
    )
    model.backbone.draft_window = None
    truth = torch.tensor([*answer, *[-1] * depth], **here).unfold(0, depth, 1)[1 : anchors + 1]
    right = count_right(
        model, target, hidden=hidden[0, :, :depth], anchor_tokens=tokens[0], truth=truth,
        candidates=None,
    )  # fmt: skip
    (stats,) = walk([right.tolist()], depth=depth, max_new_tokens=args.max_new_tokens, batches=None)
    return stats


def counted(rows: list[tuple[Any, ...]], setting: str, *, timed: bool) -> dict[str, Any]:
    """The sums over the answers that count, and each question's own numbers."""
    kept = [row for row in rows if row[2] == "used"]
    used = [(name, length, counts[setting]) for name, length, _, counts, _ in kept]
    outcomes = [outcome for _, _, outcome, *_ in rows]
    total = AcceptanceStats.sum(stats for *_, stats in used)
    speeds = list(zip(*(speed for *_, speed in kept), strict=True)) if timed and kept else []
    times = {}
    if speeds:
        plain, drafts, same = speeds
        times = {
            "speedup": sum(plain) / sum(drafts),
            "same_text": sum(same),
            "seconds": {"plain": plain, "drafts": drafts},
        }
    return {
        "tokens_per_cycle": total.tokens_per_cycle,
        **times,
        "used": len(used),
        "loops": outcomes.count("loop"),
        "short": outcomes.count("short"),
        "per_prompt": {
            "set": [name for name, *_ in used],
            "tokens": [length for _, length, _ in used],
            "committed": [stats.committed for *_, stats in used],
            "cycles": [stats.cycles for *_, stats in used],
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
