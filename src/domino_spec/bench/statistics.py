"""Ratios of sums with bootstrap intervals: prompts are drawn anew, methods stay paired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

SAMPLES = 4000
LEVEL = 0.95
FEWEST = 5
"""Under so many units an interval would be made up."""
_SEED = 20260707
"""One seed for all: the same records give the same tables."""

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""From sums [..., columns] to values [...]."""


@dataclass(frozen=True)
class Interval:
    """A figure and where it lies with a chance of 95%; no bounds where there are too few units."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> int:
        """1 or -1 where the interval lies above or below 1 as a whole, else 0: nothing is shown."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 1) - int(self.high < 1)


@lru_cache(maxsize=8)
def _drawn(units: int) -> Array:
    """How often each unit comes in each draw, [samples, units]."""
    rng = np.random.default_rng(_SEED)
    return rng.multinomial(units, [1 / units] * units, size=SAMPLES).astype(np.float64)


def interval(columns: ArrayLike, statistic: Statistic) -> Interval:
    """The statistic of the column sums of [units, columns] with its percentile interval."""
    return arithmetic_mean([columns], statistic)


def geometric_mean(tables: Sequence[ArrayLike], statistic: Statistic) -> Interval:
    """Over tasks, each counting the same; every task is drawn anew by itself."""
    return _mean(tables, statistic, over=np.log, back=np.exp)


def arithmetic_mean(tables: Sequence[ArrayLike], statistic: Statistic) -> Interval:
    """The same without logarithms."""
    return _mean(tables, statistic, over=np.asarray, back=np.asarray)


def _mean(tables: Sequence[ArrayLike], statistic: Statistic, *, over: Any, back: Any) -> Interval:
    """Units are drawn with replacement, whole rows at a time: methods stay paired."""
    values, draws = [], []
    units = [np.asarray(table, dtype=np.float64) for table in tables]
    for index, table in enumerate(units):
        values.append(over(statistic(table.sum(axis=0))))
        drawn = statistic(_drawn(len(table)) @ table)
        # One seed for all tables would draw the same units of each: mixed up, they are independent.
        np.random.default_rng([_SEED, index]).shuffle(drawn)
        draws.append(over(drawn))
    value = float(back(np.mean(values)))
    if min(map(len, units)) < FEWEST:
        return Interval(value)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(back(np.mean(draws, axis=0)), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def ratio(sums: Array) -> Array:
    """First column over second."""
    return sums[..., 0] / sums[..., 1]


def rate_ratio(sums: Array) -> Array:
    """Columns tokens, seconds, and the same of the base: how many times the base's speed."""
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
