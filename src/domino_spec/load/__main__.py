"""`python -m domino_spec.load URL ...`: the same as `domino bench serve`, without its look.

For machines without typer and rich: progress on stderr, the tables as Markdown on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from domino_spec.errors import DominoError
from domino_spec.load import Cell, LoadRequest, Settings, Side, Watcher, markdown, run_load
from domino_spec.load.options import KEY_VARIABLE, request_of
from domino_spec.load.settings import Endpoint


class Lines(Watcher):
    """A line of text for everything."""

    def say(self, message: str) -> None:
        """On stderr."""
        print(message, file=sys.stderr, flush=True)

    def progress(self, cell: Cell, side: Side, done: int, total: int | None) -> None:
        """Some of them: a line each would be the client's work."""
        if done == total or done % 50 == 0:
            self.say(f"{cell}, {side.name}: {done}" + ("" if total is None else f" of {total}"))


def parse(arguments: list[str]) -> tuple[LoadRequest, bool]:
    """The request that a command line stands for, and whether it wants JSON."""
    values = vars(_parser().parse_args(arguments))
    as_json = values.pop("json")
    return request_of(**values), as_json


def _parser() -> argparse.ArgumentParser:
    unset = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m domino_spec.load", description="Load on any OpenAI-compatible server."
    )
    add = parser.add_argument
    add("url", help="http://127.0.0.1:8000, for example")
    add("-c", "--concurrency", nargs="+", action="extend", type=int, default=[])
    add("--rate", nargs="+", action="extend", type=float, default=[], help="requests a second")
    add("--requests", type=int, help="a round")
    add("--seconds", type=float, help="a round")
    add("--rounds", type=int)
    add("--warm-up", type=int)
    add("--prompts", action="append", default=[], help="maths, code, chat, a file or hf:NAME")
    add("--limit", type=int, help="prompts a set")
    add("--system", help="a system message")
    add("-n", "--max-tokens", type=int, default=unset.max_tokens)
    add("-t", "--temperature", type=float, default=unset.temperature)
    add("--seed", type=int, default=unset.seed)
    add("--endpoint", choices=get_args(Endpoint), default=unset.endpoint)
    add("--stream", action=argparse.BooleanOptionalAction, default=unset.stream)
    add("--timeout", type=float, default=unset.timeout, help="seconds an answer may take")
    add("--model", help="unset: the first of /v1/models")
    add("--name", default="measured", help="what this side is called")
    add("--body", help="more fields of the body, as JSON; null takes one away")
    add("--api-key", help="better in an environment variable")
    add("--api-key-env", default=KEY_VARIABLE)
    add("--against", help="another address, or a body's other fields as JSON")
    add("--against-body", help="as --body, for another address")
    add("--against-name", default="against")
    add("--against-model")
    add("--against-api-key-env", help="for another address")
    add("--first-token-goal", type=float, help="seconds")
    add("--token-goal", type=float, help="seconds")
    add("--latency-goal", type=float, help="seconds")
    add("--out", type=Path, help="the file of records, added to")
    add("--json", action="store_true", help="one JSON document on stdout")
    return parser


def main(arguments: list[str]) -> int:
    """Measure, then print the tables; the exit status."""
    request, as_json = parse(arguments)
    summary, path, whole = run_load(request, Lines())
    document = {**summary.to_dict(), "records": str(path), "interrupted": not whole}
    print(json.dumps(document, indent=2, ensure_ascii=False) if as_json else markdown(summary))
    print(f"records: {path}", file=sys.stderr)
    if not whole:
        print("interrupted; these are the figures so far", file=sys.stderr)
        return 130
    if not summary.completed:
        print("error: no request was answered; the records say why.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DominoError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
