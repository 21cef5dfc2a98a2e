"""Costs are measured once a machine and kept; depth follows them; results do not change."""

import itertools
import json
import math

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine import calibration, measure
from domino_spec.engine.calibration import adapt_depth, measured_sizes
from domino_spec.engine.model_runner import KINDS, filled_size
from domino_spec.engine.policy import Batch, Costs, DepthPolicy, Drafts, budgets, depths
from tests.engine.runs import make_engine, make_requests, run_engine, run_reference
from tests.support.families import drafter_config, make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter

PROMPTS = random_prompts([3, 9, 5])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    return tmp_path


def test_costs_are_measured_once_and_kept(cache, monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=4)
    policy = adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    kept = json.loads(path.read_text())
    assert {int(batch) for batch in kept} == {1, 4}
    assert tuple(int(depth) for depth in kept["1"]["greedy"]) == depths(7)
    assert kept["1"].keys() == {"greedy", *KINDS}
    assert kept["4"]["sampled"].keys() == {"0", "7"}
    assert tuple(int(budget) for budget in kept["4"]["budgets"]) == budgets(7)
    monkeypatch.setattr(calibration, "measure_costs", None)  # nothing is measured again
    again = make_engine(make_target("llama"), random_drafter(), slots=4)
    found = adapt_depth(again)
    assert found.costs(4) == policy.costs(4)
    assert found.costs(4, KINDS) == policy.costs(4, KINDS) != policy.costs(4)


@pytest.fixture
def quick(monkeypatch):
    """Costs are made up: what is kept of them is the same."""

    def made_up(engine, batches):
        costs = {"greedy": dict.fromkeys(depths(engine.depth), 1.0)}
        costs |= {kind: {0: 0.0, engine.depth: 0.1} for kind in KINDS}
        return dict.fromkeys(batches, costs), True

    monkeypatch.setattr(calibration, "measure_costs", made_up)


@pytest.mark.usefixtures("quick")
def test_another_drafter_is_measured_anew(cache):
    for changes in ({}, {"block_size": 6}):
        drafter = random_drafter(drafter_config(**changes))
        adapt_depth(make_engine(make_target("llama"), drafter, slots=1))
    assert len(list((cache / "costs").iterdir())) == 2


@pytest.mark.parametrize("change", ["version", "DOMINO_KERNELS", "DOMINO_OVERLAP"])
@pytest.mark.usefixtures("quick")
def test_costs_of_other_kernels_are_not_believed(cache, monkeypatch, change):
    """A new release brings new kernels, and a variable may switch what they do."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    adapt_depth(engine)
    if change == "version":
        monkeypatch.setattr(calibration, "__version__", "99.0", raising=False)
    else:
        monkeypatch.setenv(change, "off")
    adapt_depth(engine)
    assert len(list((cache / "costs").iterdir())) == 2


@pytest.mark.parametrize("spoiled", [
    "", "[1, 2]", '{"1": 5}', "{", '{"1": {"greedy": {"0": 1.0, "7": -1.0}}}',
    json.dumps({"1": {str(depth): 1.0 for depth in depths(7)}}),  # before there were kinds
])  # fmt: skip
@pytest.mark.usefixtures("quick")
def test_a_spoiled_file_is_measured_again(cache, spoiled):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    first = adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    path.write_text(spoiled)
    assert set(adapt_depth(engine).costs(1)) == set(first.costs(1))
    kept = json.loads(path.read_text())
    assert kept.keys() == {"1"}
    assert kept["1"].keys() == {"greedy", *KINDS}


def test_what_did_not_fit_is_tried_again_another_day(cache, monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    own = calibration.measure_extras

    def full(bench, batch, depths):
        found = own(bench, batch, depths)
        found["filtered"][depths[-1]] = math.inf
        return found

    with monkeypatch.context() as today:
        today.setattr(calibration, "measure_extras", full)
        assert 7 not in adapt_depth(engine).costs(1, ("sampled", "filtered"))
    (path,) = (cache / "costs").iterdir()
    assert json.loads(path.read_text())["1"]["filtered"].keys() == {"0"}
    assert 7 in adapt_depth(engine).costs(1, ("sampled", "filtered"))


@pytest.mark.parametrize("lost", ["penalised", "greedy"])
def test_a_file_that_lacks_a_kind_is_completed(cache, monkeypatch, lost):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    kept = json.loads(path.read_text())
    del kept["2"][lost]
    path.write_text(json.dumps(kept))
    measured, own = [], calibration.measure_costs

    def watched(engine, batches):
        measured.extend(batches)
        return own(engine, batches)

    monkeypatch.setattr(calibration, "measure_costs", watched)
    adapt_depth(engine)
    assert measured == [2]
    after = json.loads(path.read_text())
    assert after["1"] == kept["1"]
    assert after["2"].keys() == {"greedy", *KINDS}


def test_a_busy_moment_is_not_believed(cache, monkeypatch):
    """Other work on the machine made a shallow cycle slower than a deep one."""
    busy = {0: 9.0, 1: 2.0, 2: 7.0, 3: 3.0, 5: 4.0, 7: 5.0}
    added = {kind: {0: 0.0, 7: 0.7} for kind in KINDS}
    measured = {1: {"greedy": busy} | added}
    monkeypatch.setattr(calibration, "measure_costs", lambda engine, batches: (measured, True))
    policy = adapt_depth(make_engine(make_target("llama"), random_drafter(), slots=1))
    rising = {0: 2.0, 1: 2.0, 2: 3.0, 3: 3.0, 5: 4.0, 7: 5.0}
    assert policy.costs(1) == rising
    sampled = policy.costs(1, ("sampled",))
    assert list(sampled.values()) == sorted(sampled.values())
    assert sampled[7] == 5.7


def test_a_measurement_that_does_not_settle_is_not_kept(cache, monkeypatch):
    """The machine is busy with other work: two rounds of a cycle differ."""
    monkeypatch.setattr(measure, "_NEARLY", 0.0)
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    assert adapt_depth(engine).costs(1).keys() == set(depths(7))
    assert not (cache / "costs").exists()


@pytest.mark.usefixtures("quick")
def test_measuring_anew_is_for_the_asking(cache):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    path.write_text(path.read_text().replace("1.0", "3.0"))
    assert adapt_depth(engine).costs(1)[7] == 3.0
    assert adapt_depth(engine, anew=True).costs(1)[7] == 1.0
    assert adapt_depth(engine).costs(1)[7] == 1.0  # and kept


def test_batches_that_would_take_too_long_are_extrapolated(monkeypatch):
    """On a CPU a cycle costs what its tokens cost; beyond what was measured, on the same line."""
    monkeypatch.setattr(calibration, "_MOST_SECONDS", 0.0)
    own = {"greedy": {0: 1.0, 1: 1.5, 2: 1.75, 3: 2.0, 5: 2.5}} | {kind: {0: 0.1} for kind in KINDS}
    monkeypatch.setattr(calibration, "_whole_cycles", lambda *_: (dict(own), True))
    monkeypatch.setattr(calibration, "measure_extras", lambda *_: {})
    engine = make_engine(make_target("llama"), random_drafter(), slots=4)
    found, settled = calibration.measure_costs(engine, [4, 1])
    assert settled
    assert found[1] == own
    assert found[4]["greedy"] == {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0, 5: 7.0}
    assert found[4]["budgets"] == {1: 3.0, 2: 4.0, 3: 5.0, 5: 7.0}  # as chains, until seen
    assert found[4]["sampled"] == {0: 0.4}
    own["greedy"] = {
        0: 1.0,
        1: 2.0,
        2: 1.9,
        3: 1.9,
        5: 1.9,
    }  # a busy moment: nothing costs less than nothing
    found, _ = calibration.measure_costs(engine, [1, 2])
    assert set(found[2]["greedy"].values()) == {1.9}


def test_cycles_tell_the_policy_what_they_take(monkeypatch):
    """Those that ran alone: the first has no report before it, and one shared its step."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    engine.policy = policy = DepthPolicy(Costs({1: {0: 1.0, 7: 1.5}, 2: {0: 1.0, 7: 1.5}}), 7)
    seen = []
    monkeypatch.setattr(policy, "observe", lambda *told: seen.append(told))
    _, stats, _ = run_engine(engine, PROMPTS[:2], max_new_tokens=30)
    assert 2 <= len(seen) < stats.cycles
    assert {batch.size for batch, _, _ in seen} <= {1, 2}
    assert all(drafts in (Drafts(0), Drafts(7)) and seconds > 0 for _, drafts, seconds in seen)


def test_cycles_beside_a_prompt_or_a_hook_tell_nothing(monkeypatch):
    """A step that computes part of a prompt, or waits for the host, takes longer."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, chunk=1)
    engine.policy = policy = DepthPolicy(Costs({1: {0: 1.0, 7: 1.5}, 2: {0: 1.0, 7: 1.5}}), 7)
    seen = []
    monkeypatch.setattr(policy, "observe", lambda *told: seen.append(told))
    first, second = make_requests([[3, 1], list(range(1, 13))], max_new_tokens=30)
    engine.add_request(first)
    while first.cycles < 3:
        engine.step()
    before = len(seen)
    engine.add_request(second)
    while not second.output:
        engine.step()
    assert before
    assert first.cycles > 9  # while the second's prompt was computed
    assert len(seen) == before
    hooked = SamplingParams(max_new_tokens=3, processors=(lambda _, scores: scores,))
    sequences = tuple(make_requests(PROMPTS[:1], params=[hooked]))
    assert not engine._kind_of(sequences, drafts=True)[1].timed


def test_measuring_again_keeps_what_was_learnt():
    engine = make_engine(make_target("llama"), random_drafter(), slots=4)
    first = adapt_depth(engine, batches=[1])
    first.record(3, 7, sampled=True)
    chances = engine.runner.chances.weights.clone()
    second = adapt_depth(engine, batches=[1, 4])
    assert torch.equal(engine.runner.chances.weights, chances)  # of measurements nothing
    assert second.promises is first.promises
    assert (second.drawn, second.acceptance) == (first.drawn, first.acceptance)
    assert second.drawn.cycles == 1


def test_without_a_drafter_there_is_nothing_to_choose():
    assert adapt_depth(make_engine(make_target("llama"), None)) is None


@pytest.mark.parametrize(("slots", "expected"), [
    (1, [1]), (4, [1, 4]), (6, [1, 4, 6]), (64, [1, 4, 16, 64]), (100, [1, 4, 16, 64]),
])  # fmt: skip
def test_few_numbers_of_rows_are_measured(slots, expected):
    assert measured_sizes(slots) == expected


# In an engine -------------------------------------------------------------------------------------


class Asked(DepthPolicy):
    """Notes what it was asked and shown."""

    def __init__(self, depth):
        super().__init__(Costs({1: dict.fromkeys(depths(7), 1.0)}), 7)
        self.depth, self.batches, self.shown = depth, [], []

    def choose(self, batch):
        self.batches.append(batch)
        return Drafts(self.depth)

    def record(self, accepted, depth, *, sampled):
        self.shown.append((depth, sampled))


def test_a_cycle_is_of_the_kind_that_some_sequence_needs():
    engine = make_engine(make_target("llama"), random_drafter(), slots=4)
    engine.policy = policy = Asked(depth=3)
    greedy = SamplingParams(max_new_tokens=30)
    alone = Batch(1)
    run_engine(engine, PROMPTS[:1], params=[greedy])
    assert set(policy.batches) == {alone}
    assert set(policy.shown) == {(3, False)}
    policy.batches.clear()
    policy.shown.clear()
    short = {"max_new_tokens": 4, "ignore_eos": True}
    mixed = [
        greedy,
        SamplingParams(temperature=0.7, top_p=0.9, **short),
        SamplingParams(presence_penalty=0.5, **short),
    ]
    run_engine(engine, PROMPTS, params=mixed)
    kinds = ("sampled", "uncoupled", "filtered", "penalised")
    assert policy.batches[0] == Batch(3, kinds, 1 / 3)
    assert policy.batches[-1] == alone, "the expensive sequences have left"
    assert set(policy.shown) == {(3, False), (3, True)}


def test_graphs_run_filled_batches_and_cost_as_much():
    engine = make_engine(make_target("llama"), random_drafter(), slots=5)
    engine.policy = policy = Asked(depth=0)
    engine.runner.size_of = filled_size
    run_engine(engine, [PROMPTS[0]] * 5, max_new_tokens=3, ignore_eos=True)
    assert policy.batches[0].size == 8


def test_a_sequence_without_drafts_does_not_ask_the_policy():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    engine.policy = policy = Asked(depth=3)
    (plain,) = make_requests(PROMPTS[:1], max_new_tokens=6)
    plain.speculate = False
    list(engine.stream([plain]))
    assert policy.batches == []


def test_rows_that_sample_are_decoded_plainly_where_only_greedy_ones_pay():
    engine = make_engine(bigram_target(), knowing_drafter(shift=True, prefix=1), slots=1)
    costs = {1: {0: 1.0, 1: 1.02, 3: 1.1, 7: 1.2}}
    expensive = {"sampled": {1: {0: 0.1, 7: 20.0}}}
    engine.policy = DepthPolicy(Costs(costs, expensive), 7)
    for temperature, drafts in ((0.0, True), (0.01, False), (0.0, True)):
        _, counts, _ = run_engine(engine, [[1, 2]], max_new_tokens=60, temperature=temperature)
        assert (counts.drafted > 0) == drafts


@pytest.mark.parametrize("ahead", [False, True])
def test_changing_depths_change_no_token(ahead):
    target = make_target("qwen3")
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=30)
    engine = make_engine(target, random_drafter(), slots=2, ahead=ahead, tree=31)
    chosen = [(7,), (0,), (5, 5), (3,), (7, 31), (0,), (0,), (1,), (7,), (1, 1), (2,)]
    turns = itertools.cycle(itertools.starmap(Drafts, chosen))

    class Restless(DepthPolicy):
        def choose(self, batch):
            return next(turns)

    engine.policy = Restless(Costs({1: {0: 1.0}}), 7, 31)
    found, _, _ = run_engine(engine, PROMPTS, max_new_tokens=30)
    assert found == expected


def test_a_drafter_that_knows_is_given_its_whole_block():
    engine = make_engine(bigram_target(), knowing_drafter(shift=True, prefix=1), slots=1)
    costs = Costs({1: {0: 1.0, 1: 1.02, 3: 1.1, 7: 1.2}})
    engine.policy = DepthPolicy(costs, 7)
    _, counts, _ = run_engine(engine, [[1, 2]], max_new_tokens=60)
    assert counts.tokens_per_cycle > 7
