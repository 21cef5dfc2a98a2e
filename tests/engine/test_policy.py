"""Depth follows cost and acceptance."""

import math
from unittest import mock

import pytest

from domino_spec.engine.policy import (
    Acceptance,
    Batch,
    Costs,
    DepthPolicy,
    Drafts,
    best_path,
    budgeted,
    budgets,
    depths,
    trees,
)

FLAT = {d: 1.0 + 0.001 * d for d in depths(15)}  # a GPU with one row: verifying is free
STEEP = {d: 1.0 + 0.9 * d for d in depths(15)}  # a busy one: every token costs


def taught(policy: DepthPolicy, accepted: int, depth: int = 15, times: int = 200) -> DepthPolicy:
    for _ in range(times):
        policy.acceptance.record(accepted, depth)
    return policy


def test_free_drafts_are_all_verified():
    assert taught(DepthPolicy(Costs({1: FLAT}), 15), accepted=4).choose(Batch(1)).depth >= 5


def test_dear_drafts_that_fail_are_not_verified():
    policy = taught(DepthPolicy(Costs({1: STEEP}), 15), accepted=0)
    assert policy.choose(Batch(1)).depth == 0
    assert policy.gain(Batch(1)) == 1.0


def test_dear_drafts_are_verified_as_far_as_they_hold():
    costs = {d: 1.0 + 0.1 * d for d in depths(15)}
    assert taught(DepthPolicy(Costs({1: costs}), 15), accepted=3).choose(Batch(1)).depth == 3


def test_plain_decoding_is_left_now_and_then_to_look_again():
    policy = taught(DepthPolicy(Costs({1: STEEP}), 15), accepted=0)
    tried = [policy.choose(Batch(1)).depth for _ in range(200)]
    assert sorted(set(tried)) == [0, 1]
    assert tried.count(1) == 3


def test_while_plain_decoding_goes_on_it_is_reconsidered_now_and_then_alone():
    policy = taught(DepthPolicy(Costs({1: STEEP, 2: STEEP}), 15), accepted=0)
    with mock.patch.object(policy, "_choose_depth", wraps=policy._choose_depth) as chooses:
        for _ in range(320):
            policy.choose(Batch(1))
        assert 20 <= chooses.call_count <= 20 + 2 * 5  # and the cycle after each look
        policy.choose(Batch(2))  # others, which nobody considered
        assert chooses.call_args.args[1] == Batch(2)


def test_what_a_look_tells_is_considered_at_once():
    policy = taught(DepthPolicy(Costs({1: STEEP}), 15), accepted=0)
    while not policy.choose(Batch(1)).depth:
        pass
    taught(policy, accepted=15)
    assert policy.choose(Batch(1)).depth == 15


def test_a_few_cycles_are_tried_before_drafts_are_given_up():
    """What was expected of a drafter is not what is known of it."""
    # Worth it for a drafter that is always right, and 4.2 are expected.
    expensive = {0: 1.0, 7: 4.5}
    knowing, useless = DepthPolicy(Costs({1: expensive}), 7), DepthPolicy(Costs({1: expensive}), 7)
    for _ in range(60):
        assert knowing.choose(Batch(1)).depth == 7
        knowing.acceptance.record(7, 7)
    tried = 0
    for _ in range(60):
        if useless.choose(Batch(1)).depth:
            tried += 1
            useless.acceptance.record(0, 7)
    assert tried == 4
    assert (knowing.disabled is None, useless.disabled is None) == (True, False)
    hopeless = DepthPolicy(Costs({1: {d: 1.0 + 1.5 * d for d in depths(7)}}), 7)
    assert {hopeless.choose(Batch(1)).depth for _ in range(200)} == {0}


def test_giving_up_is_explained_by_what_was_measured():
    policy = taught(DepthPolicy(Costs({1: STEEP, 4: {0: 2.0, 3: 9.0}}), 15), accepted=0)
    for _ in range(60):
        policy.choose(Batch(4))
    found = policy.disabled
    assert (found.batch_size, found.plain, found.depth, found.cycle) == (4, 2.0, 3, 9.0)
    assert found.tokens == pytest.approx(1.0, abs=0.2)


# Kinds of cycles ----------------------------------------------------------------------------------

SAMPLED = Batch(1, ("sampled",), 1.0)


def both_taught(policy: DepthPolicy, accepted: int) -> DepthPolicy:
    for _ in range(200):
        for sampled in (False, True):
            policy.record(accepted, 15, sampled=sampled)
    return policy


def test_drafts_pay_for_greedy_rows_and_not_for_those_that_sample():
    expensive = {"sampled": {1: {0: 0.0, 15: 30.0}}}
    policy = both_taught(DepthPolicy(Costs({1: FLAT}, expensive), 15), accepted=1)
    assert policy.choose(Batch(1)).depth > 0
    assert policy.gain(Batch(1)) > 1.5
    assert policy.choose(SAMPLED).depth == 0
    assert policy.gain(SAMPLED) == 1.0
    assert policy.choose(Batch(1, ("sampled",), 0.5)).depth == 0, (
        "one that samples makes all cycles slow"
    )
    cheap = both_taught(DepthPolicy(Costs({1: FLAT}), 15), accepted=1)
    assert cheap.choose(SAMPLED).depth > 0, "the costs made the difference"


def test_dear_choices_make_cycles_shallow_before_they_make_them_plain():
    extras = {"sampled": {1: {0: 0.0, 15: 4.5}}}  # 0.3 a draft
    policy = both_taught(DepthPolicy(Costs({1: FLAT}, extras), 15), accepted=5)
    assert policy.choose(Batch(1)).depth >= policy.choose(SAMPLED).depth == 5
    extras = {"sampled": {1: {0: 0.0, 15: 4.5}}, "filtered": {1: {0: 0.0, 15: 15.0}}}
    policy = both_taught(DepthPolicy(Costs({1: FLAT}, extras), 15), accepted=5)
    assert policy.choose(Batch(1, ("sampled", "filtered"), 1.0)).depth == 0


def test_rows_that_sample_and_greedy_rows_are_not_judged_by_one_another():
    costs = {d: 1.0 + 0.2 * d for d in depths(15)}
    policy = DepthPolicy(Costs({1: costs}), 15)
    for _ in range(200):
        policy.record(7, 15, sampled=False)
        policy.record(0, 15, sampled=True)
    assert policy.choose(Batch(1)).depth == 7
    assert policy.choose(SAMPLED).depth == 0
    assert policy.tokens(7, Batch(4, ("sampled",), 0.25)) == pytest.approx(0.75 * 8 + 0.25, abs=0.1)


def test_kinds_are_given_up_and_tried_again_each_on_its_own():
    """Greedy cycles in between do not put off the next look at sampled ones."""
    policy = DepthPolicy(Costs({1: {0: 1.0, 1: 1.5}}), 1)
    for _ in range(200):
        policy.record(1, 1, sampled=False)
        policy.record(0, 1, sampled=True)
    tried = [(policy.choose(Batch(1)).depth, policy.choose(SAMPLED).depth) for _ in range(130)]
    assert {greedy for greedy, _ in tried} == {1}
    assert [sampled for _, sampled in tried].count(1) == 2
    assert policy.disabled.kinds == ("sampled",)
    policy.choose(Batch(1))
    assert policy.disabled is None


def test_the_first_sampled_cycles_are_tried_though_greedy_ones_are_known():
    policy = DepthPolicy(Costs({1: {0: 1.0, 7: 4.5}}), 7)
    taught(policy, accepted=0, depth=7)
    assert policy.choose(Batch(1)).depth == 0
    assert policy.choose(SAMPLED).depth == policy.choose(Batch(2, ("sampled",), 0.5)).depth == 7


# Acceptance ---------------------------------------------------------------------------------------


def test_a_depth_that_does_not_fit_is_never_chosen():
    costs = Costs({1: {0: 1.0, 3: 1.01, 7: 1.02}}, {"filtered": {1: {0: 0.0, 3: 0.1, 7: math.inf}}})
    policy = DepthPolicy(costs, 7)
    for sampled in (False, True):
        for _ in range(50):
            policy.record(7, 7, sampled=sampled)
    assert policy.choose(Batch(1)).depth == 7
    assert policy.choose(Batch(1, ("filtered",), 1.0)).depth == 3
    assert policy.costs(1, ("filtered",)).keys() == {0, 3}


def test_old_cycles_fade():
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.record(4, 4)
    assert acceptance.tokens(4) == pytest.approx(5.0, abs=0.05)
    for _ in range(300):
        acceptance.record(0, 4)
    assert acceptance.tokens(1) == pytest.approx(1.0, abs=0.05)


def test_drafts_that_had_no_chance_do_not_count():
    acceptance = Acceptance(4)
    before = acceptance.offered[2]
    acceptance.record(1, 4)
    assert acceptance.offered[2] == before


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 15, 16])
def test_the_ladder_ends_with_the_drafters_depth(limit):
    assert depths(limit)[0] == 0
    assert depths(limit)[-1] == limit


# Trees --------------------------------------------------------------------------------------------

BRANCHED = Batch(1, trees=True)
FORK = [0, 0, 0, 1, 2, 2, 3, 6]  # the anchor has two children; best children: 1, 3, 6, 7


def with_trees(cost: float, *, chain: float = 1.0) -> DepthPolicy:
    """Chains and trees of 7 drafts, at these costs."""
    costs = Costs({1: {0: 0.8, 7: chain}}, trees={1: {3: 0.9 * cost, 7: cost}})
    return DepthPolicy(costs, 7, 7)


def test_a_tree_is_chosen_while_it_commits_more_a_second():
    policy = with_trees(1.1)
    assert policy.choose(Batch(1)) == Drafts(7)
    assert policy.choose(BRANCHED) == Drafts(7, 7), "it is tried first"
    for _ in range(50):  # the second child every time: a chain would have got nothing
        policy.record_tree([2, 4], FORK, sampled=False)
    assert policy.choose(BRANCHED).nodes == 7
    assert policy.tokens(7, BRANCHED) < 1.3
    for _ in range(300):
        policy.record_tree([2, 4], FORK, sampled=False)
    for _ in range(2000):
        policy.record_tree([2, 4], FORK, sampled=False)
    assert policy.acceptance.tree_tokens(7) == pytest.approx(3.0, abs=0.05)
    assert policy.acceptance.tree_tokens(3) == pytest.approx(2.0, abs=0.05)


def test_a_tree_that_gains_nothing_is_left_and_tried_again_now_and_then():
    policy = with_trees(1.15)
    chosen = []
    for _ in range(200):
        drafts = policy.choose(BRANCHED)
        chosen.append(drafts.nodes)
        if drafts.nodes:
            policy.record_tree(
                [1, 3, 6, 7][: drafts.nodes], FORK[: drafts.nodes + 1], sampled=False
            )
        else:
            policy.record(4, 7, sampled=False)
    assert sum(map(bool, chosen[:16])) >= 2
    assert 1 <= sum(map(bool, chosen[16:])) <= 4


def test_a_tree_that_costs_little_more_and_gains_nothing_is_left_for_good():
    policy = DepthPolicy(Costs({1: {0: 0.8, 7: 1.0}}, trees={1: {7: 1.04}}), 7, 7)
    chosen = []
    for _ in range(4000):
        drafts = policy.choose(BRANCHED)
        chosen.append(drafts.nodes)
        if drafts.nodes:
            policy.record_tree([1], FORK[: drafts.nodes + 1], sampled=False)
        else:
            policy.record(1, 7, sampled=False)
    assert sum(map(bool, chosen[2000:])) < 100


def test_a_tree_too_expensive_to_pay_is_never_tried():
    policy = with_trees(2.5)
    for _ in range(200):
        assert policy.choose(BRANCHED) == Drafts(7)
        policy.record(3, 7, sampled=False)


def test_trees_tell_what_chains_would_have_got():
    """As far as they hold them: the rest of the chain is not known to have failed."""
    acceptance = Acceptance(7, 7)
    for _ in range(300):
        acceptance.record_tree([1, 3, 6, 7], FORK)
    assert best_path(FORK) == [1, 3, 6, 7]
    assert acceptance.tokens(4) == pytest.approx(5.0, abs=0.05)
    assert acceptance.offered[4:] == Acceptance(7).offered[4:]
    for _ in range(300):
        acceptance.record_tree([1, 3], FORK)
    assert acceptance.tokens(3) == pytest.approx(3.0, abs=0.05)


def test_what_trees_gain_is_remembered_while_the_text_changes():
    """What they accepted of harder text says nothing of how they do on this one."""
    policy = with_trees(1.1)
    for _ in range(100):
        policy.record_tree([2, 4], FORK, sampled=False)
    for _ in range(100):
        policy.record(5, 7, sampled=False)
    assert policy.acceptance.tree_tokens(7) > policy.tokens(7, BRANCHED) + 1.9
    assert policy.choose(BRANCHED) == Drafts(7, 7)


def test_what_trees_sample_is_paid_for_by_the_token():
    extras = {"sampled": {1: {0: 0.0, 7: 0.7}}}
    costs = Costs({1: {0: 1.0, 7: 1.0}}, extras, {1: {7: 1.0, 15: 1.0}})
    assert costs.of_trees(1, ("sampled",)) == {7: 1.7, 15: pytest.approx(2.4)}
    assert costs.of_trees(1) == {7: 1.0, 15: 1.0}


@pytest.mark.parametrize(
    ("limit", "found"), [(0, ()), (2, (2,)), (7, (3, 7)), (20, (3, 7, 15, 20))]
)
def test_the_sizes_of_trees_end_with_the_largest(limit, found):
    assert trees(limit) == found


def test_a_bad_start_does_not_condemn_trees():
    """And a retry asks for the largest tree that could pay: it tells of all smaller ones."""
    policy = with_trees(1.05)

    def lose(cycles: int) -> None:  # the trees' chains end before those that are drafted as such
        for _ in range(cycles):
            policy.record_tree([1, 3, 6, 7], FORK, sampled=False)
            policy.record(7, 7, sampled=False)

    lose(4)
    assert policy.acceptance.tree_tokens(7) > 6
    lose(200)
    sampled = Batch(1, ("sampled",), 1.0, trees=True)
    tried = [(policy.choose(BRANCHED), policy.choose(sampled)) for _ in range(64)]
    assert tried[0][0] == Drafts(7)
    assert tried[-1][0] == Drafts(7, 7), "sampled cycles in between do not put it off"


# What cycles take -------------------------------------------------------------------------------

ONE = Batch(1)


def lived(policy, costs, cycles, *, accepted=5):
    """Cycles that take what they take, whatever was measured; the depths chosen."""
    chosen = []
    for cycle in range(cycles):
        drafts = policy.choose(ONE)
        chosen.append(drafts.depth)
        slow = 8.0 if cycle % 7 == 3 else 1.0  # other work on the machine
        policy.observe(ONE, drafts, slow * costs[drafts.depth])
        policy.record(min(accepted, drafts.depth), drafts.depth, sampled=False)
    return chosen


@pytest.mark.parametrize("wrong", [7.2, 0.3], ids=["too expensive", "too cheap"])
def test_costs_that_were_measured_wrongly_do_not_stay(wrong):
    """Drafts pay, and a busy moment said that they do not; or the other way round."""
    true = {0: 1.0, 7: 1.85 if wrong > 1 else 9.0}
    policy = DepthPolicy(Costs({1: {0: 1.0, 7: true[7] * wrong}}), 7)
    lived(policy, true, 1000)
    right = 7 if true[7] < 6 else 0
    assert lived(policy, true, 100).count(right) > 90
    assert policy.costs(1)[right] / true[right] == pytest.approx(1.0, rel=0.3)


def test_what_was_measured_a_little_too_expensive_is_seen_for_itself():
    """A depth between two others, which a busy moment kept from ever being the best."""
    true = {0: 1.0, 2: 1.55, 3: 1.75, 7: 3.0}
    for measured in (true | {2: 1.95, 3: 2.1}, true | {2: 1.95, 3: 1.75}):
        policy = DepthPolicy(Costs({1: measured}), 7)
        lived(policy, true, 400, accepted=2)
        assert lived(policy, true, 100, accepted=2).count(2) > 80


def test_what_slows_all_cycles_down_changes_no_choice():
    """A longer context, say: plain decoding would be slower too, though it was not seen."""
    measured = {0: 1.0, 3: 1.2, 7: 1.5}
    policy = DepthPolicy(Costs({1: measured}), 7)
    chosen = lived(policy, {depth: 4 * seconds for depth, seconds in measured.items()}, 200)
    assert chosen.count(7) > 190
    assert policy.costs(1)[0] == pytest.approx(4.0, rel=0.3)


def test_a_pause_is_no_cost():
    policy = DepthPolicy(Costs({1: {0: 1.0, 7: 1.5}}), 7)
    for _ in range(50):
        policy.observe(ONE, Drafts(7), 60.0)
        policy.observe(ONE, Drafts(7), 1.5)
    assert policy.costs(1) == {0: 1.0, 7: pytest.approx(1.5)}


def test_what_always_takes_ten_times_as_long_is_believed():
    policy = DepthPolicy(Costs({1: {0: 1.0, 7: 1.5}}), 7)
    for _ in range(50):
        policy.observe(ONE, Drafts(7), 30.0)
    assert policy.costs(1) == {0: pytest.approx(20.0), 7: pytest.approx(30.0)}


@pytest.mark.parametrize("slowed", [4.0, 9.0])
def test_a_busy_while_is_forgotten(slowed):
    """Depths that were run while the machine was slow are tried again."""
    true = {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3, 5: 1.5, 7: 1.7}
    policy = DepthPolicy(Costs({1: true}), 7)
    lived(policy, true, 100, accepted=6)
    lived(policy, {depth: slowed * seconds for depth, seconds in true.items()}, 20, accepted=6)
    lived(policy, true, 3000, accepted=6)
    assert lived(policy, true, 100, accepted=6).count(7) > 80


CHEAP = {0: 1.0, 1: 1.3, 2: 1.4, 3: 1.5, 5: 1.7, 7: 1.9}
OVERHEAD = {0: 1.0, 1: 2.5, 2: 3.2, 3: 3.6, 5: 4.0, 7: 4.5}  # only deep drafts could pay
SLOW = {d: 1.3 + 0.5 * d if d else 1.0 for d in depths(7)}


@pytest.mark.parametrize(("cycles", "batch"), [
    (OVERHEAD, ONE), (SLOW, Batch(4, ragged=True)), (CHEAP, BRANCHED)
], ids=["overhead", "budgets", "trees"])  # fmt: skip
def test_drafts_that_are_never_accepted_cost_two_percent_at_most(cycles, batch):
    """Of 5,000 tokens, the first trials among them; and they are found once they pay."""
    taken = {Drafts(depth): seconds for depth, seconds in cycles.items()}
    costs = Costs(
        {batch.size: cycles},
        trees={batch.size: {n: 1.05 * cycles[n] for n in (3, 7)}},
        budgets={batch.size: {b: 0.1 + cycles[b] for b in budgets(7)}},
    )
    taken |= {Drafts(n, n): seconds for n, seconds in costs.trees[batch.size].items()}
    taken |= {budgeted(b, 7): seconds for b, seconds in costs.budgets[batch.size].items()}
    policy = DepthPolicy(costs, 7, 7)

    def spent(accepted: int) -> float:
        drafts = policy.choose(batch)
        policy.observe(batch, drafts, taken[drafts])
        count = min(accepted, drafts.depth)
        if drafts.nodes:
            parents = list(range(-1, drafts.nodes))
            policy.record_tree(range(1, count + 1), [0, *parents[1:]], sampled=False)
        elif drafts.budget:
            policy.record_lengths(batch, [0.5] * drafts.depth, drafts.budget, count)
        elif drafts.depth:
            for _ in range(batch.size):
                policy.record(count, drafts.depth, sampled=False)
        return taken[drafts]

    first = sum(spent(0) for _ in range(2500))
    second = sum(spent(0) for _ in range(2500))
    assert first + second < 1.02 * 5000
    assert second < 1.0175 * 2500
    for _ in range(1000):
        spent(7)
    assert sum(spent(7) for _ in range(100)) > 1.1 * 100, "it drafts"
