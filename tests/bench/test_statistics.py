"""Intervals against what is known beforehand."""

import math

import numpy as np
import pytest

from domino_spec.bench.statistics import (
    FEWEST,
    Interval,
    arithmetic_mean,
    geometric_mean,
    interval,
    rate_ratio,
    ratio,
)


def test_the_ratio_is_that_of_sums_not_the_mean_of_ratios():
    found = interval([[1.0, 1.0], [30.0, 10.0]] * 5, ratio)
    assert found.value == pytest.approx(31 / 11)


def test_pairs_that_all_agree_leave_nothing_to_chance():
    """Times differ a hundredfold from prompt to prompt; paired, the ratio is 2 in every draw."""
    table = [[100.0, 1.0 * n, 100.0, 2.0 * n] for n in (1, 5, 20, 100, 3, 7)]
    found = interval(table, rate_ratio)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_is_as_wide_as_theory_says():
    rng = np.random.default_rng(1)
    below = rng.uniform(1, 2, size=400)
    above = below * 1.5 + rng.normal(0, 0.3, size=400)
    found = interval(np.stack([above, below], axis=1), ratio)
    rest = above - found.value * below  # the delta method's standard error of a ratio of sums
    error = math.sqrt(len(rest)) * rest.std() / below.sum()
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(120):
        below = rng.exponential(1.0, size=60) + 0.5
        above = 3.0 * below * rng.lognormal(-0.02, 0.2, size=60)  # its mean is 1
        found = interval(np.stack([above, below], axis=1), ratio)
        held += found.low <= 3.0 <= found.high
    assert 0.90 <= held / 120 <= 0.99


def test_too_few_units_get_no_interval():
    few = [[2.0, 1.0]] * (FEWEST - 1)
    assert interval(few, ratio) == Interval(2.0)
    assert interval([*few, [2.0, 1.0]], ratio).low == pytest.approx(2.0)
    assert geometric_mean([few * 9, few], ratio).low is None


def test_over_tasks_each_counts_the_same():
    tables = [[[4.0, 1.0]] * 50, [[1.0, 1.0]] * 5]
    assert geometric_mean(tables, ratio).value == pytest.approx(2.0)
    assert arithmetic_mean(tables, ratio).value == pytest.approx(2.5)


def test_tasks_are_drawn_independently():
    """Over four tasks alike the interval is half as wide, not as wide as one task's."""
    rng = np.random.default_rng(3)
    table = np.stack([rng.normal(10, 1, size=80), np.full(80, 10.0)], axis=1)
    one, four = interval(table, ratio), arithmetic_mean([table] * 4, ratio)
    width = (four.high - four.low) / (one.high - one.low)
    assert width == pytest.approx(0.5, abs=0.05)


def test_verdicts_need_the_whole_interval():
    assert Interval(1.2, 1.1, 1.3).verdict == 1
    assert Interval(0.8, 0.7, 0.9).verdict == -1
    assert Interval(1.2, 0.9, 1.5).verdict == 0
    assert Interval(9.0).verdict == 0


def test_the_same_records_give_the_same_interval():
    table = np.random.default_rng(4).uniform(1, 2, size=(30, 2))
    assert interval(table, ratio) == interval(table, ratio)
