"""Made-up records of a load."""

from __future__ import annotations

import itertools
from typing import Any

from domino_spec.load.settings import LoadSettings

COMMON = {"run": "r", "concurrency": 2, "rate": None, "side": "one", "round": 0, "warm_up": False}
ENVIRONMENT = {
    "date": "2026-01-01", "commit": "abc", "command": "domino bench serve", "hardware": "a CPU",
    "python": "3.11", "versions": {"torch": "2", "transformers": "5"},
}  # fmt: skip


def facts(names: tuple[str, ...] = ("one",), **settings: Any) -> dict[str, Any]:
    sides = [
        {"name": name, "url": "http://x", "model": "m", "body": {}, "server": None}
        for name in names
    ]
    recorded = LoadSettings(url="http://x", **settings).recorded()
    return {"kind": "run", "run": "r", "settings": recorded, "prompts": 3, "tasks": [],
            "sides": sides, "environment": ENVIRONMENT}  # fmt: skip


def request_record(
    *, sent: float = 0.0, ended: float = 1.0, chunks: list[float] | None = None, **others: Any
) -> dict[str, Any]:
    times = chunks or []
    return {
        "kind": "request", **COMMON, "index": 0, "scheduled": sent, "sent": sent, "ended": ended,
        "first": times[0] if times else None, "last": times[-1] if times else None,
        "gaps_us": [round((b - a) * 1e6) for a, b in itertools.pairwise(times)],
        "chunk_tokens": None, "status": 200, "error": None, "message": None,
        "retry_after": None, "finish_reason": "stop", "prompt_tokens": 10, "tokens": 0,
        "cached_tokens": None, "accepted": None, "rejected": None, "characters": 4,
        "text_sha256": "same", **others,
    }  # fmt: skip


def round_record(requests: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {"kind": "round", **COMMON, "requests": len(requests), "seconds": 1.0, "complete": True,
            "client_busy": 0.1, **others}  # fmt: skip


def two_sides(
    rounds: list[tuple[float, float]], names: tuple[str, str] = ("one", "two"), **others: Any
) -> list[dict[str, Any]]:
    """Two requests a round, answered in so many seconds by the one and the other."""
    records = [facts(names, rounds=len(rounds))]
    for number, seconds in enumerate(rounds):
        for name, each in zip(names, seconds, strict=True):
            place = {"side": name, "round": number, **others}
            requests = [
                request_record(ended=each, chunks=[each / 2, each], tokens=11, index=i, **place)
                for i in range(2)
            ]
            records += [*requests, round_record(requests, **place)]
    return records
