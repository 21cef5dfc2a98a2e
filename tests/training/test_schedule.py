"""λ, the learning rate and total variation over a run."""

from itertools import pairwise

import pytest

from domino_spec.errors import ConfigError
from domino_spec.training.schedule import Schedule


def schedule(**changes):
    return Schedule(**{"total_steps": 200, "learning_rate": 1e-3, **changes})


def test_a_curriculum_lets_lambda_fall_linearly_to_where_it_ends():
    found = schedule(curriculum_ratio=1.0, base_weight=0.0)
    for step in range(201):
        assert found.base_share(step) == pytest.approx(1 - step / 200)


def test_lambda_over_a_part_of_the_run():
    found = schedule(curriculum_ratio=0.25, base_weight=0.2)
    assert found.base_share(0) == 1.0
    assert found.base_share(25) == pytest.approx(0.6)
    assert [found.base_share(step) for step in (50, 51, 199)] == pytest.approx([0.2] * 3)


def test_without_a_curriculum_lambda_stays():
    assert {schedule(base_weight=0.3).base_share(step) for step in range(200)} == {0.3}


@pytest.mark.parametrize("steps", [None, 0, -1, 10.0, "100", float("inf")])
def test_unknown_steps_are_an_error_and_never_a_lambda_of_zero(steps):
    with pytest.raises(ConfigError, match="number of steps.*`steps` or `epochs`"):
        schedule(total_steps=steps)


@pytest.mark.parametrize("ratio", [-0.5, 1.5])
def test_a_curriculum_longer_than_the_run_is_refused(ratio):
    with pytest.raises(ConfigError, match="curriculum_ratio"):
        schedule(curriculum_ratio=ratio)


def test_the_rate_warms_up_and_ends_as_a_cosine():
    found = schedule(warmup_ratio=0.05)
    rates = [found.rate(step) for step in range(201)]
    assert rates[:10] == pytest.approx([1e-3 * (step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1e-3)
    assert all(high > low for high, low in pairwise(rates[10:]))
    assert rates[105] == pytest.approx(0.5e-3), "the middle of the cosine"
    assert rates[200] == pytest.approx(0.0, abs=1e-12)
    assert rates[199] > 0, "the last step still learns"


def test_the_rate_stays_above_its_floor():
    found = schedule(min_lr_ratio=0.1)
    assert found.rate(200) == pytest.approx(1e-4)
    assert min(found.rate(step) for step in range(20, 200)) > 1e-4


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs(steps):
    found = schedule(total_steps=steps)
    assert all(0 < found.rate(step) <= 1e-3 for step in range(steps))
    assert schedule(total_steps=steps, curriculum_ratio=1.0).base_share(0) == 1.0


def test_no_warm_up():
    assert schedule(warmup_ratio=0.0).rate(0) == pytest.approx(1e-3)


def test_total_variation_comes_in_late():
    found = schedule(tv_weight=0.8, tv_start=0.5)
    assert [found.tv_share(step) for step in (0, 50, 100)] == [0.0, 0.0, 0.0]
    assert found.tv_share(150) == pytest.approx(0.4)
    assert found.tv_share(200) == pytest.approx(0.8)
    assert {schedule().tv_share(step) for step in range(200)} == {0.0}
