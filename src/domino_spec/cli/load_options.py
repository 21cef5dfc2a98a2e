"""Options of `domino bench serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_LOAD = "Load"
_ASKED = "What is asked"
_COMPARE = "Comparison"
_GOALS = "Goodput"
_KEY_VARIABLE = "OPENAI_API_KEY"
_SEVERAL = ("--concurrency", "-c", "--rate")


class SeveralValues(TyperCommand):
    """`--concurrency 1 8 32` means `--concurrency 1 --concurrency 8 --concurrency 32`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each further number."""
        spread: list[str] = []
        option = None
        for word in args:
            if word.startswith("-"):
                option = word if word in _SEVERAL else None
            elif option is not None and spread[-1] != option and _is_number(word):
                spread.append(option)
            elif option is not None and spread[-1] != option:
                option = None
            spread.append(word)
        parsed: list[str] = super().parse_args(ctx, spread)
        return parsed


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class Endpoint(StrEnum):
    """Where requests go."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How many, how often, how long."""

    concurrency: Annotated[
        list[int],
        typer.Option(
            "--concurrency", "-c",
            help="Requests under way at any time (closed loop); several: -c 1 8 32. Unset, and no "
            "rate: 1 and 8.",
            rich_help_panel=_LOAD,
        ),
    ] = field(default_factory=list)  # fmt: skip
    rate: Annotated[
        list[float],
        typer.Option(
            help="Requests a second by chance (open loop), whether or not earlier ones are "
            "answered; several.",
            rich_help_panel=_LOAD,
        ),
    ] = field(default_factory=list)
    requests: Annotated[
        int | None,
        typer.Option(
            help="Of each side a round; unset: 4 times the concurrency, at least 16.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Of each side a round, after which none starts; unset at a rate: 20.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    rounds: Annotated[
        int | None,
        typer.Option(help="Unset: 1, and 8 with --against.", rich_help_panel=_LOAD),
    ] = None
    warm_up: Annotated[
        int | None,
        typer.Option(
            help="Requests of each side before each load, not counted; unset: the concurrency.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    timeout: Annotated[
        float, typer.Option(help="Seconds an answer may take.", rich_help_panel=_LOAD)
    ] = 600.0


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """What every request says."""

    model: Annotated[
        str | None,
        typer.Option(help="Unset: the first of /v1/models.", rich_help_panel=_ASKED),
    ] = None
    prompts: Annotated[
        list[str],
        typer.Option(
            help='maths, code, chat (built in), JSON lines of {"turns": [...]} or hf:NAME[:SPLIT]; '
            "repeatable; unset: the three built in.",
            rich_help_panel=_ASKED,
        ),
    ] = field(default_factory=list)
    limit: Annotated[
        int | None, typer.Option(help="Prompts a set, from the first.", rich_help_panel=_ASKED)
    ] = None
    system: Annotated[
        str | None, typer.Option(help="A system message.", rich_help_panel=_ASKED)
    ] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", rich_help_panel=_ASKED)] = 256
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_ASKED)
    ] = 0.0
    seed: Annotated[
        int, typer.Option(help="Request i asks with it + i.", rich_help_panel=_ASKED)
    ] = 0
    endpoint: Annotated[Endpoint, typer.Option(rich_help_panel=_ASKED)] = Endpoint.CHAT
    stream: Annotated[bool, typer.Option("--stream/--no-stream", rich_help_panel=_ASKED)] = True
    body: Annotated[
        str | None,
        typer.Option(
            help="More fields of the body, as JSON; null takes one away.", rich_help_panel=_ASKED
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Better in an environment variable; never recorded.", rich_help_panel=_ASKED
        ),
    ] = None
    api_key_env: Annotated[
        str,
        typer.Option(
            help="The environment variable with the server's key, if it wants one.",
            rich_help_panel=_ASKED,
        ),
    ] = _KEY_VARIABLE


@dataclass(frozen=True, kw_only=True)
class AgainstOptions:
    """What it is held against, in turns."""

    against: Annotated[
        str | None,
        typer.Option(
            help="Another address, or a body's other fields as JSON, such as "
            '\'{"domino": {"speculate": false}}\'.',
            rich_help_panel=_COMPARE,
        ),
    ] = None
    against_body: Annotated[
        str | None,
        typer.Option(help="As --body, for another address.", rich_help_panel=_COMPARE),
    ] = None
    against_model: Annotated[
        str | None, typer.Option(help="Its model's name there.", rich_help_panel=_COMPARE)
    ] = None
    against_api_key_env: Annotated[
        str | None,
        typer.Option(
            help="The environment variable with its key; the first server's is not sent to "
            "another.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    name: Annotated[
        str, typer.Option(help="What the measured is called.", rich_help_panel=_COMPARE)
    ] = "measured"
    against_name: Annotated[str, typer.Option(help="And the other.", rich_help_panel=_COMPARE)] = (
        "against"
    )


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """Which answers are good."""

    first_token_goal: Annotated[
        float | None, typer.Option(help="Seconds to the first token.", rich_help_panel=_GOALS)
    ] = None
    token_goal: Annotated[
        float | None, typer.Option(help="Seconds per token after it.", rich_help_panel=_GOALS)
    ] = None
    latency_goal: Annotated[
        float | None, typer.Option(help="Seconds of the whole answer.", rich_help_panel=_GOALS)
    ] = None
