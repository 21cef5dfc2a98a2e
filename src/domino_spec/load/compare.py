"""One side over the other, round by round, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from domino_spec.bench.statistics import Interval, interval, rate_ratio
from domino_spec.load import figures
from domino_spec.load.figures import Record
from domino_spec.load.settings import Cell


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ratios of the first side to the second; None where a side has nothing to compare.

    The units of the intervals are rounds, both sides of one together: requests of one round met
    the same load and are not independent.
    """

    rounds: int
    tokens_per_second: Interval | None
    requests_per_second: Interval | None
    first_token: Interval | None
    token_time: Interval | None
    latency: Interval | None
    same: int
    compared: int
    """Answers to the same request, both completed; `same` of them have the same text."""

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            name: value.to_dict() if isinstance(value, Interval) else value
            for name, value in vars(self).items()
        }


def compare(cell: Cell, first: Sequence[Record], second: Sequence[Record]) -> Comparison:
    """Over the rounds that both sides finished."""
    sides = [_rounds(first), _rounds(second)]
    numbers = sorted(sides[0].keys() & sides[1].keys())
    pairs = [(sides[0][number], sides[1][number]) for number in numbers]

    def over(amount: Callable[[list[Record]], tuple[float, float]]) -> Interval | None:
        table = [[*amount(one), *amount(other)] for one, other in pairs]
        sums = np.asarray(table, dtype=np.float64).reshape(-1, 4).sum(axis=0)
        if not (sums > 0).all():
            return None
        if not np.all(table):  # a draw of such rounds alone would be no ratio
            return Interval(float(rate_ratio(sums)))
        return interval(table, rate_ratio)

    def mean_of(value: Callable[[Record], float | None]) -> Interval | None:
        def amount(requests: list[Record]) -> tuple[float, float]:
            found = [v for r in _good(requests) if (v := value(r)) is not None]
            return sum(found), len(found)

        return over(amount)

    def pace_of(value: Callable[[Record], float]) -> Interval | None:
        def amount(requests: list[Record]) -> tuple[float, float]:
            seconds = figures.span(requests, rate=cell.rate)
            return sum(value(r) for r in _good(requests)), seconds

        return over(amount)

    same, compared = _same(pairs)
    return Comparison(
        rounds=len(pairs),
        tokens_per_second=pace_of(figures.tokens),
        requests_per_second=pace_of(lambda _: 1),
        first_token=mean_of(figures.first_token),
        token_time=mean_of(figures.token_time),
        latency=mean_of(figures.latency),
        same=same,
        compared=compared,
    )


def _rounds(lines: Sequence[Record]) -> dict[int, list[Record]]:
    whole = {line["round"] for line in lines if line["kind"] == "round" and line["complete"]}
    found: dict[int, list[Record]] = {number: [] for number in whole}
    for line in lines:
        if line["kind"] == "request" and line["round"] in whole:
            found[line["round"]].append(line)
    return found


def _good(requests: Sequence[Record]) -> list[Record]:
    return [r for r in requests if r["error"] is None]


def _same(pairs: Sequence[tuple[list[Record], list[Record]]]) -> tuple[int, int]:
    same = compared = 0
    for one, other in pairs:
        texts = {r["index"]: r["text_sha256"] for r in _good(one)}
        for record in _good(other):
            if record["index"] in texts:
                compared += 1
                same += record["text_sha256"] == texts[record["index"]]
    return same, compared
