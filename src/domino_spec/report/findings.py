"""Sentences that claim no more than their intervals do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from domino_spec.bench.statistics import Interval

_VERDICTS = {1: "faster", -1: "slower", 0: "no clear difference"}


def verdict_of(ratio: Interval) -> str:
    """faster or slower where the whole interval is, in a word."""
    return _VERDICTS[ratio.verdict] if ratio.low is not None else "no interval"


@dataclass(frozen=True)
class Finding:
    """One sentence about a method or a side."""

    method: str
    verdict: str
    rest: str
    kind: str
    """faster or slower where that holds everywhere, else unclear."""

    @classmethod
    def of(cls, method: str, verdicts: Sequence[str], words: str, rest: str) -> Finding:
        """With the kind that all verdicts agree on."""
        agreed = verdicts[0] if len(set(verdicts)) == 1 else "unclear"
        return cls(method, words, rest, agreed if agreed in ("faster", "slower") else "unclear")
