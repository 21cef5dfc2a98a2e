"""What a load is: how many at once or how often, of what, against whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from domino_spec.errors import InputError

Endpoint = Literal["chat", "completions"]

_REQUESTS_AT_ONCE = 4
_FEWEST_REQUESTS = 16
_OPEN_SECONDS = 20.0


@dataclass(frozen=True)
class Cell:
    """One load: so many requests at once (closed loop), or so many a second (open loop)."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise InputError("a load is either a concurrency or a rate; give one of them.")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency is {self.concurrency}; expected 1 or more.")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InputError(f"rate is {self.rate}; expected more than 0 requests a second.")

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for records."""
        return {"concurrency": self.concurrency, "rate": self.rate}


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What an answer must keep to count for goodput, in seconds; None asks for nothing."""

    first_token: float | None = None
    token: float | None = None
    """Time per token after the first."""
    latency: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise InputError(f"the goal for {name} is {value}; expected seconds above 0.")

    @property
    def any(self) -> bool:
        """Whether something is asked for."""
        return any(value is not None for value in vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the compared: an address and what its requests say beside the common."""

    name: str
    url: str
    """Without /v1."""
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all requests of a run share."""

    endpoint: Endpoint = "chat"
    stream: bool = True
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    """Request i of a run asks with it + i; arrivals are drawn from it."""
    requests: int | None = None
    """A round; unset: as many as `seconds` bring, or enough for the load."""
    seconds: float | None = None
    """A round; no request starts later."""
    rounds: int = 1
    warm_up: int | None = None
    """Requests of each side before a load is measured; None: as many as run at once."""
    timeout: float = 600.0
    goals: Goals = field(default_factory=Goals)

    def __post_init__(self) -> None:
        if self.endpoint not in get_args(Endpoint):
            raise InputError(f"endpoint is {self.endpoint!r}; expected chat or completions.")
        for name, least in (("max_tokens", 1), ("requests", 1), ("rounds", 1), ("warm_up", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; expected {least} or more.")
        if not self.temperature >= 0:
            raise InputError(f"temperature is {self.temperature}; expected 0 or more.")
        for name in ("seconds", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} is {value}; expected more than 0.")

    def check(self, cell: Cell) -> None:
        """Refuse a round that never fills its load."""
        if cell.concurrency is not None and (self.requests or cell.concurrency) < cell.concurrency:
            raise InputError(
                f"a round of {self.requests} requests never has {cell.concurrency} at once; "
                "expected at least as many requests as concurrency."
            )

    def amount(self, cell: Cell) -> tuple[int | None, float | None]:
        """Requests and seconds of a round, of which at least one is set."""
        if self.requests is not None or self.seconds is not None:
            return self.requests, self.seconds
        if cell.concurrency is None:
            return None, _OPEN_SECONDS
        return max(_REQUESTS_AT_ONCE * cell.concurrency, _FEWEST_REQUESTS), None

    def warm_up_of(self, cell: Cell) -> int:
        """Requests before a load is measured."""
        return (cell.concurrency or 1) if self.warm_up is None else self.warm_up

    def to_dict(self) -> dict[str, Any]:
        """Plain values for records."""
        return {**vars(self), "goals": dict(vars(self.goals))}


def base_url(text: str) -> str:
    """An address as routes are added to it: no /v1, no slash at the end."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"the server is {text!r}; expected a URL such as http://127.0.0.1:8000.")
    if parts.username is not None or parts.password is not None:
        raise InputError("the server's URL holds a password; expected the key in --api-key-env.")
    if parts.query or parts.fragment:
        raise InputError(f"the server is {text!r}; expected a URL without ? and #.")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def same_origin(one: str, other: str) -> bool:
    """Whether two addresses are of one server: a key for the one is a key for the other."""
    first, second = urlsplit(one), urlsplit(other)
    return (first.scheme, first.netloc) == (second.scheme, second.netloc)
