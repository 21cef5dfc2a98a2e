"""Settings of a load test; the options of `domino bench serve` are the fields of `LoadSettings`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)
from typer import Argument, Option

from domino_spec.errors import InputError

_CONCURRENCIES = (1, 8)
_REQUESTS_PER_SLOT = 4
_MIN_REQUESTS = 16
_OPEN_LOOP_SECONDS = 20.0
_COMPARED_ROUNDS = 8
"""Enough rounds for a bootstrap interval."""
_RECORDED = ("endpoint", "stream", "max_tokens", "temperature", "seed", "requests", "seconds",
             "rounds", "warm_up", "timeout")  # fmt: skip

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _option(panel: str, text: str | None = None, *names: str, **more: Any) -> Any:
    return Option(*names, help=text, rich_help_panel=panel, **more)


_load, _request, _compare, _goodput = (
    partial(_option, panel) for panel in ("Load", "Requests", "Comparison", "Goodput")
)


def base_url(text: str) -> str:
    """A server's URL without /v1 and without a trailing slash."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"the server is {text!r}; expected a URL such as http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise InputError("the server's URL holds a password; expected the key in --api-key-env.")
    if parts.query or parts.fragment:
        raise InputError(f"the server is {text!r}; expected a URL without ? and #.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `upper` over those of `lower`, also inside objects; null values are kept."""
    result = dict(lower)
    for name, value in upper.items():
        old = result.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merged(old, value)
        result[name] = value
    return result


@dataclass(frozen=True)
class Cell:
    """One load: a concurrency (closed loop) or a request rate (open loop)."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.rate is None:
            return f"concurrency {self.concurrency}"
        return f"{self.rate:g} req/s"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the compared: a server, a model there and body fields of its own."""

    name: str
    url: str
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)


class LoadSettings(BaseModel):
    """What to send where; values come from the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # fmt: off
    url: Annotated[str, AfterValidator(base_url), Argument(
        metavar="URL", help="The server, such as http://127.0.0.1:8000.")]

    concurrency: Annotated[list[PositiveInt], _load(
        "Requests in flight (closed loop); several: -c 1 8 32. Without this and --rate: 1 and 8.",
        "--concurrency", "-c")] = []
    rate: Annotated[list[Positive], _load(
        "Requests per second, Poisson arrivals (open loop); several.")] = []
    requests: Annotated[PositiveInt | None, _load(
        "Per side and round; unset: 4 times the concurrency, at least 16.")] = None
    seconds: Annotated[Positive | None, _load(
        "Per side and round; no request starts later. Unset with --rate: 20.")] = None
    rounds: Annotated[PositiveInt | None, _load("Unset: 1, with --against 8.")] = None
    warm_up: Annotated[NonNegativeInt | None, _load(
        "Requests of each side before each load, in no figure; unset: the concurrency.")] = None
    timeout: Annotated[Positive, _load("Seconds a request may take.")] = 600.0

    model: Annotated[str | None, _request("Unset: the first of /v1/models.")] = None
    prompts: Annotated[list[str], _request(
        'maths, code, chat (built in), JSON lines of {"turns": [...]} or hf:NAME[:SPLIT]; '
        "repeatable; unset: the three built in.")] = []
    limit: Annotated[int | None, _request("Prompts per set, from the first.")] = None
    system: Annotated[str | None, _request("A system message.")] = None
    max_tokens: Annotated[PositiveInt, _request(None, "--max-tokens", "-n")] = 256
    temperature: Annotated[NonNegativeFloat, _request("0 is greedy.", "--temperature", "-t")] = 0.0
    seed: Annotated[int, _request("Request i is sent with seed + i.")] = 0
    endpoint: Annotated[Literal["chat", "completions"], _request()] = "chat"
    stream: Annotated[bool, _request(None, "--stream/--no-stream")] = True
    body: Annotated[Json[dict[str, Any]] | None, _request(
        "More fields of the body; null removes one.", parser=str, metavar="JSON")] = None
    api_key: Annotated[str | None, Field(repr=False), _request(
        "Better in an environment variable; never recorded.")] = None
    api_key_env: Annotated[str, _request(
        "The environment variable that holds the server's key.")] = "OPENAI_API_KEY"

    against: Annotated[str | None, _compare(
        "Another URL, or other fields of the body as JSON, such as "
        '\'{"domino": {"speculate": false}}\'.')] = None
    against_body: Annotated[Json[dict[str, Any]] | None, _compare(
        "As --body, for another URL.", parser=str, metavar="JSON")] = None
    against_model: Annotated[str | None, _compare("The model's name at --against.")] = None
    against_api_key_env: Annotated[str | None, _compare(
        "The environment variable with its key; the first server's key is not sent to another."
    )] = None
    name: Annotated[str, _compare("The first side's name.")] = "measured"
    against_name: Annotated[str, _compare("The second side's name.")] = "against"

    first_token_goal: Annotated[Positive | None, _goodput("Seconds of TTFT.")] = None
    token_goal: Annotated[Positive | None, _goodput("Seconds of TPOT.")] = None
    latency_goal: Annotated[Positive | None, _goodput("Seconds of end-to-end latency.")] = None

    out: Annotated[Path | None, Option(
        help="The file of raw records, appended to; unset: load-MODEL-RUN.jsonl here.")] = None
    # fmt: on

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for cell in self.cells:
            if self.cells.count(cell) > 1:
                raise InputError(f"the load {cell} is given twice; expected each once.")
            if cell.concurrency and self.requests and self.requests < cell.concurrency:
                raise InputError(
                    f"a round of {self.requests} requests never reaches concurrency "
                    f"{cell.concurrency}; expected at least as many requests."
                )
        if self.against_body is not None and self.against is None:
            raise InputError("--against-body has no --against; give the URL that it is for.")
        if self.against is not None and self.against_name == self.name:
            raise InputError(f"both sides are called {self.name!r}; give one another name.")
        for body in (self.body, self.against_target[1]):
            if "stream" in (body or {}):
                raise InputError("the body sets stream; expected --stream or --no-stream for that.")
        return self

    @property
    def cells(self) -> list[Cell]:
        """The loads, closed loops first."""
        cells = [Cell(concurrency=c) for c in self.concurrency]
        cells += [Cell(rate=rate) for rate in self.rate]
        return cells or [Cell(concurrency=c) for c in _CONCURRENCIES]

    @property
    def against_target(self) -> tuple[str, dict[str, Any]]:
        """URL and body fields of the second side."""
        text = self.against or self.url
        if not text.lstrip().startswith("{"):
            return base_url(text), self.against_body or {}
        if self.against_body is not None:
            raise InputError("--against is a body already; expected a URL with --against-body.")
        try:
            return self.url, json.loads(text)
        except ValueError as error:
            raise InputError(f"--against is not valid JSON: {error}.") from error

    @property
    def round_count(self) -> int:
        """Rounds of every load."""
        return self.rounds or (1 if self.against is None else _COMPARED_ROUNDS)

    def amount(self, cell: Cell) -> tuple[int | None, float]:
        """Requests (None: no limit) and seconds of a round."""
        if self.requests is not None or self.seconds is not None:
            return self.requests, self.seconds or math.inf
        if cell.concurrency is None:
            return None, _OPEN_LOOP_SECONDS
        return max(_REQUESTS_PER_SLOT * cell.concurrency, _MIN_REQUESTS), math.inf

    def warm_up_requests(self, cell: Cell) -> int:
        """Requests before a load is measured."""
        return (cell.concurrency or 1) if self.warm_up is None else self.warm_up

    def recorded(self) -> dict[str, Any]:
        """What a record says of the settings; no keys."""
        goals = {
            "first_token": self.first_token_goal,
            "token": self.token_goal,
            "latency": self.latency_goal,
        }
        values = self.model_dump(include=set(_RECORDED))
        return {**values, "rounds": self.round_count, "goals": goals}
