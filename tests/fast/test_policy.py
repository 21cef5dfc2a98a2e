"""Depth follows cost and acceptance."""

import pytest

from domino_spec.fast.policy import Acceptance, DepthPolicy, depths

FLAT = {d: 1.0 + 0.001 * d for d in depths(15)}  # a GPU with one row: verifying is free
STEEP = {d: 1.0 + 0.9 * d for d in depths(15)}  # a busy one: every token costs


def taught(policy: DepthPolicy, accepted: int, depth: int = 15, times: int = 200) -> DepthPolicy:
    for _ in range(times):
        policy.acceptance.observe(accepted, depth)
    return policy


def test_free_drafts_are_all_verified():
    assert taught(DepthPolicy({1: FLAT}, 15), accepted=4).choose(1) >= 5


def test_dear_drafts_that_fail_are_not_verified():
    policy = taught(DepthPolicy({1: STEEP}, 15), accepted=0)
    assert policy.choose(1) == 0
    assert policy.gain(1) == 1.0


def test_dear_drafts_are_verified_as_far_as_they_hold():
    costs = {d: 1.0 + 0.1 * d for d in depths(15)}
    assert taught(DepthPolicy({1: costs}, 15), accepted=3).choose(1) == 3


def test_plain_decoding_is_left_now_and_then_to_look_again():
    policy = taught(DepthPolicy({1: STEEP}, 15), accepted=0)
    tried = [policy.choose(1) for _ in range(200)]
    assert sorted(set(tried)) == [0, 1]
    assert tried.count(1) == 3


def test_a_few_cycles_are_tried_before_drafts_are_given_up():
    """What was expected of a drafter is not what is known of it."""
    dear = {0: 1.0, 7: 4.5}  # worth it for a drafter that is always right, and 4.2 are expected
    knowing, useless = DepthPolicy({1: dear}, 7), DepthPolicy({1: dear}, 7)
    for _ in range(60):
        assert knowing.choose(1) == 7
        knowing.acceptance.observe(7, 7)
    tried = 0
    for _ in range(60):
        if useless.choose(1):
            tried += 1
            useless.acceptance.observe(0, 7)
    assert tried == 4
    assert (knowing.resigned is None, useless.resigned is None) == (True, False)
    hopeless = DepthPolicy({1: {d: 1.0 + 1.5 * d for d in depths(7)}}, 7)
    assert {hopeless.choose(1) for _ in range(200)} == {0}


def test_giving_up_is_explained_by_what_was_measured():
    policy = taught(DepthPolicy({1: STEEP, 4: {0: 2.0, 3: 9.0}}, 15), accepted=0)
    for _ in range(60):
        policy.choose(4)
    found = policy.resigned
    assert (found.rows, found.plain, found.depth, found.cycle) == (4, 2.0, 3, 9.0)
    assert found.tokens == pytest.approx(1.0, abs=0.2)


def test_costs_of_the_next_measured_number_of_rows():
    policy = DepthPolicy({1: FLAT, 8: STEEP}, 15)
    assert policy.costs(1) == FLAT
    assert policy.costs(2) == policy.costs(8) == policy.costs(64) == STEEP


def test_old_cycles_fade():
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.observe(4, 4)
    assert acceptance.tokens(4) == pytest.approx(5.0, abs=0.05)
    for _ in range(300):
        acceptance.observe(0, 4)
    assert acceptance.tokens(1) == pytest.approx(1.0, abs=0.05)


def test_drafts_that_had_no_chance_do_not_count():
    acceptance = Acceptance(4)
    before = acceptance.offered[2]
    acceptance.observe(1, 4)
    assert acceptance.offered[2] == before


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 15, 16])
def test_the_ladder_ends_with_the_drafters_depth(limit):
    assert depths(limit)[0] == 0
    assert depths(limit)[-1] == limit
