"""What single requests say, and how many of them it takes to say more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """A distribution; a quantile is None where fewer than one sample is expected beyond it."""

    samples: int
    mean: float
    p50: float
    p95: float | None
    p99: float | None
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles | None:
        """Of what was seen; None of nothing."""
        if not values:
            return None
        found = np.asarray(values, dtype=np.float64)

        def at(share: float) -> float | None:
            if len(found) * (1 - share) < 1 - 1e-9:
                return None
            return float(np.quantile(found, share))

        return cls(
            samples=len(found),
            mean=float(found.mean()),
            p50=float(np.quantile(found, 0.5)),
            p95=at(0.95),
            p99=at(0.99),
            largest=float(found.max()),
        )


def latency(record: Record) -> float:
    """From when it was due to the end of the answer."""
    return float(record["ended"] - record["scheduled"])


def first_token(record: Record) -> float | None:
    """From when it was due to the first text."""
    return None if record["first"] is None else float(record["first"] - record["scheduled"])


def tokens(record: Record) -> int:
    """By usage, else as the chunks tell, else a token a chunk."""
    if record["tokens"] is not None:
        return int(record["tokens"])
    return sum(record["chunk_tokens"] or [1] * len(chunk_times(record)))


def token_time(record: Record) -> float | None:
    """Mean time per token after the first chunk; None of an answer that came in one piece."""
    if not record["gaps_us"]:
        return None
    rest = tokens(record) - (record["chunk_tokens"] or [1])[0]
    return (record["last"] - record["first"]) / rest if rest > 0 else None


def chunk_gaps(record: Record) -> list[float]:
    """Between one piece of text and the next."""
    return [gap / 1e6 for gap in record["gaps_us"]]


def chunk_times(record: Record) -> list[float]:
    """When each piece of text came."""
    if record["first"] is None:
        return []
    return list(itertools.accumulate(chunk_gaps(record), initial=record["first"]))


def token_gaps(record: Record) -> list[float]:
    """A chunk's gap shared out among its tokens; nothing where the server does not tell them."""
    told = record["chunk_tokens"]
    if told is None:
        return []
    gaps = zip(chunk_gaps(record), told[1:], strict=True)
    return [gap / count for gap, count in gaps for _ in range(count)]


def span(records: Sequence[Record], *, rate: float | None) -> float:
    """Seconds of a round: an open loop's begins with its clock, a closed one's with a request."""
    if not records:
        return 0.0
    begin = 0.0 if rate is not None else min(r["scheduled"] for r in records)
    return float(max(r["ended"] for r in records) - begin)


def full_window(records: Sequence[Record], concurrency: int) -> tuple[float, float] | None:
    """When a closed loop had all places taken: not while it filled, nor while it ran dry."""
    sent = sorted(r["sent"] for r in records if r["sent"] is not None)
    if len(sent) < concurrency:
        return None
    begin = sent[concurrency - 1]
    end = min((r["ended"] for r in records if r["ended"] > sent[-1]), default=sent[-1])
    return (begin, end) if end > begin else None


def tokens_between(record: Record, begin: float, end: float) -> float:
    """Tokens that arrived in a window; without counts a chunk, each chunk has its share."""
    times = chunk_times(record)
    if not times:
        return 0.0
    shares = record["chunk_tokens"] or [tokens(record) / len(times)] * len(times)
    end += 0.5e-6  # times are on record to the microsecond, their sums not quite
    return math.fsum(share for at, share in zip(times, shares, strict=True) if begin < at <= end)
