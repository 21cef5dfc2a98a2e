"""Costs of any rows, depth and kind, from the few that were measured."""

import math

import pytest

from domino_spec.engine.policy import Costs, rising

GREEDY = {1: {0: 1.0, 3: 2.0, 7: 4.0}, 4: {0: 4.0, 3: 8.0, 7: 16.0}, 16: {0: 5.0, 3: 9.0, 7: 40.0}}
EXTRAS = {
    "sampled": {1: {0: 0.1, 7: 0.8}, 4: {0: 0.4, 7: 3.9}, 16: {0: 1.0, 7: 8.0}},
    "penalised": {1: {0: 0.0, 7: 0.7}, 4: {0: 0.0, 7: 1.4}, 16: {0: 0.0, 7: 2.1}},
}


def test_measured_batches_cost_what_was_measured():
    assert Costs(GREEDY).of(4) == GREEDY[4]


@pytest.mark.parametrize(("rows", "expected"), [
    (2, {0: 2.0, 3: 4.0, 7: 8.0}),
    (3, {0: 3.0, 3: 6.0, 7: 12.0}),
    (10, {0: 4.5, 3: 8.5, 7: 28.0}),
    (64, GREEDY[16]),
])  # fmt: skip
def test_rows_in_between_are_on_the_line_and_beyond_it_ends(rows, expected):
    assert Costs(GREEDY).of(rows) == pytest.approx(expected)


def test_rows_below_the_first_cost_as_it_does():
    costs = Costs({4: GREEDY[4], 16: GREEDY[16]})
    assert costs.of(1) == GREEDY[4]
    assert costs.largest_batch == 16


def test_between_rows_only_depths_that_both_know():
    assert Costs({1: {0: 1.0, 7: 2.0}, 3: {0: 3.0, 5: 4.0, 7: 6.0}}).of(2) == {0: 2.0, 7: 4.0}


def test_extras_lie_on_the_line_between_depths():
    found = Costs(GREEDY, EXTRAS).of(1, ("sampled",))
    assert found == pytest.approx({0: 1.1, 3: 2.4, 7: 4.8})


def test_extras_lie_on_the_line_between_rows():
    found = Costs(GREEDY, EXTRAS).of(2, ("penalised",))
    assert found[7] == pytest.approx(8.0 + 0.7 + (1.4 - 0.7) / 3)


def test_extras_add_up():
    costs = Costs(GREEDY, EXTRAS)
    alone, sampled, penalised, both = (
        costs.of(16, kinds)
        for kinds in ((), ("sampled",), ("penalised",), ("sampled", "penalised"))
    )
    for depth in (0, 3, 7):
        assert both[depth] - alone[depth] == pytest.approx(
            sampled[depth] + penalised[depth] - 2 * alone[depth]
        )
    assert both[7] == pytest.approx(40.0 + 8.0 + 2.1)


def test_what_nobody_measured_adds_nothing():
    assert Costs(GREEDY, EXTRAS).of(1, ("scored",)) == GREEDY[1]


def test_a_deeper_cycle_costs_no_less_whatever_it_is_made_of():
    busy = {1: {0: 1.0, 3: 1.2, 7: 1.1}}
    falling = {"sampled": {1: {0: 0.9, 7: 0.1}}}
    for costs in (Costs(busy), Costs(busy, falling)):
        for kinds in ((), ("sampled",)):
            found = list(costs.of(1, kinds).values())
            assert found == sorted(found)
    assert rising({7: 5.0, 0: 9.0, 1: 2.0}) == {0: 2.0, 1: 2.0, 7: 5.0}


def test_costs_of_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one batch size"):
        Costs({})


def test_next_to_what_does_not_fit_nothing_fits():
    extras = {"filtered": {1: {0: 0.0, 3: 0.1, 7: math.inf}, 4: {0: 0.0, 3: math.inf, 7: math.inf}}}
    costs = Costs({1: GREEDY[1], 4: GREEDY[4]}, extras)
    assert costs.of(1, ("filtered",)) == {0: 1.0, 3: 2.1, 7: math.inf}
    assert costs.of(2, ("filtered",)) == {0: 2.0, 3: math.inf, 7: math.inf}
    assert costs.of(2) == {0: 2.0, 3: 4.0, 7: 8.0}
