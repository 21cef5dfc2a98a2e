"""`python -m domino_spec.bench TARGET --draft ...`: the same as `domino bench`, without its look.

For machines without typer and rich: progress on stderr, the tables as Markdown on stdout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import torch

from domino_spec.bench import Cell, Request, Watcher, markdown, run_request
from domino_spec.bench.settings import LoopChoice
from domino_spec.decoding.params import AcceptRule
from domino_spec.errors import DominoError

_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Lines(Watcher):
    """A line of text for everything."""

    def say(self, message: str) -> None:
        """On stderr."""
        print(message, file=sys.stderr, flush=True)

    def progress(self, cell: Cell, done: int, total: int) -> None:
        """Every unit, so that a log shows how far a killed run came."""
        self.say(f"{cell}: {done} of {total}")


def parse(arguments: list[str]) -> Request:
    """The request that a command line stands for."""
    values = vars(_parser().parse_args(arguments))
    thinking, dtype = values.pop("thinking"), values.pop("dtype")
    load: dict[str, Any] = {
        name: values.pop(name)
        for name in ("revision", "device", "attn_implementation", "trust_remote_code")
    }
    if dtype is not None:
        load["dtype"] = dtype if dtype == "auto" else getattr(torch, dtype)
    # An option that may be repeated has no default of its own: it would be added to.
    values = {n: v for n, v in values.items() if v is not None}
    lists = {n: tuple(v) for n, v in values.items() if isinstance(v, list)}
    chat = {} if thinking is None else {"enable_thinking": thinking}
    return Request(**{**values, **lists}, chat_options=chat, load=load)


def _parser() -> argparse.ArgumentParser:
    unset = Request(target="")
    parser = argparse.ArgumentParser(
        prog="python -m domino_spec.bench", description="Drafters against plain decoding."
    )
    add = parser.add_argument
    add("target", help="a folder, a GGUF file or a hub id")
    add("--draft", action="append", default=[], help="a drafter; repeatable")
    add("--prompts", action="append", default=[], help="maths, code, chat, a file or hf:NAME")
    add("--limit", type=int, help="prompts a set")
    add("-t", "--temperature", dest="temperatures", action="append", type=float)
    add("-b", "--batch-size", dest="batch_sizes", action="append", type=int)
    add("--engine", choices=get_args(LoopChoice), default=unset.engine)
    add("-n", "--max-new-tokens", type=int, default=unset.max_new_tokens)
    add("--shortest-answer", type=int, default=unset.shortest_answer)
    add("--repeats", type=int, default=unset.repeats)
    add("--warm-up", type=int, default=unset.warm_up)
    add("--seed", type=int, default=unset.seed)
    add("--accept", choices=get_args(AcceptRule), default=unset.accept)
    add("--adaptive", action="store_true", help="the engine chooses each cycle's depth")
    add("--depth", type=int)
    add("--candidates", type=int)
    add("--shift-label", action=argparse.BooleanOptionalAction)
    add("--system", help="a system message")
    add("--thinking", action=argparse.BooleanOptionalAction)
    add("--revision")
    add("--dtype", choices=_DTYPES)
    add("--device")
    add("--attn-implementation")
    add("--trust-remote-code", action="store_true")
    add("--out", type=Path, help="the file of records, continued where it ends")
    return parser


def main(arguments: list[str]) -> None:
    """Measure, then print the tables."""
    summary, path = run_request(parse(arguments), Lines())
    print(markdown([summary]))
    print(f"records: {path}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DominoError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from here")
