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
    Field,
    Json,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from domino_spec.bench.settings import LIMIT_HELP, PROMPTS_HELP
from domino_spec.errors import InputError
from domino_spec.settings import Settings, setting

_CONCURRENCIES = (1, 8)
_REQUESTS_PER_SLOT = 4
_MIN_REQUESTS = 16
_OPEN_LOOP_SECONDS = 20.0
_COMPARED_ROUNDS = 8
"""Enough rounds for a bootstrap interval."""
_RECORDED = ("endpoint", "stream", "max_tokens", "temperature", "seed", "requests", "seconds",
             "rounds", "warm_up", "timeout")  # fmt: skip

Positive = Annotated[float, Field(gt=0)]

_load, _request, _compare, _goodput = (
    partial(setting, group=group) for group in ("Load", "Requests", "Comparison", "Goodput")
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


class LoadSettings(Settings):
    """What to send where; values come from the command line."""

    url: Annotated[str, AfterValidator(base_url)] = setting(
        ..., "the server, such as http://127.0.0.1:8000", argument=""
    )

    concurrency: tuple[PositiveInt, ...] = _load(
        (),
        "requests in flight (closed loop); several: -c 1 8 32. Without this and --rate: 1 and 8",
        flags=("-c",),
    )
    rate: tuple[Positive, ...] = _load(
        (), "requests per second, Poisson arrivals (open loop); several"
    )
    requests: PositiveInt | None = _load(
        None, "per side and round", unset="4 times the concurrency, at least 16"
    )
    seconds: Positive | None = _load(
        None, "per side and round; no request starts later. Unset with --rate: 20"
    )
    rounds: PositiveInt | None = _load(
        None, "in each the sides take turns", unset="1, with --against 8"
    )
    warm_up: NonNegativeInt | None = _load(
        None, "requests of each side before each load, in no figure", unset="the concurrency"
    )
    timeout: Positive = _load(600.0, "seconds a request may take")

    model: str | None = _request(None, "the model's name", unset="the first of /v1/models")
    prompts: tuple[str, ...] = _request((), PROMPTS_HELP)
    limit: PositiveInt | None = _request(None, LIMIT_HELP, unset="all")
    system: str | None = _request(None, "a system message")
    max_tokens: PositiveInt = _request(256, "the longest answer", flags=("-n",))
    temperature: NonNegativeFloat = _request(0.0, "0 is greedy", flags=("-t",))
    seed: int = _request(0, "request i is sent with seed + i")
    endpoint: Literal["chat", "completions"] = _request("chat", "which of the server's APIs")
    stream: bool = _request(True, "read the answer as it comes")
    body: Json[dict[str, Any]] | None = _request(None, "more fields of the body; null removes one")
    api_key: Annotated[str | None, Field(repr=False)] = _request(
        None, "better in an environment variable; never recorded"
    )
    api_key_env: str = _request(
        "OPENAI_API_KEY", "the environment variable that holds the server's key"
    )

    against: str | None = _compare(
        None,
        "another URL, or other fields of the body as JSON, such as "
        '\'{"domino": {"speculate": false}}\'',
    )
    against_body: Json[dict[str, Any]] | None = _compare(None, "as --body, for another URL")
    against_model: str | None = _compare(None, "the model's name at --against")
    against_api_key_env: str | None = _compare(
        None,
        "the environment variable with its key; the first server's key is not sent to another",
    )
    name: str = _compare("measured", "the first side's name")
    against_name: str = _compare("against", "the second side's name")

    first_token_goal: Positive | None = _goodput(None, "seconds of TTFT")
    token_goal: Positive | None = _goodput(None, "seconds of TPOT")
    latency_goal: Positive | None = _goodput(None, "seconds of end-to-end latency")

    out: Path | None = setting(
        None, "the file of raw records, appended to", unset="load-MODEL-RUN.jsonl here"
    )

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
