"""Which cycles are recorded, and which are kept; recording itself needs a GPU."""

import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine import model_runner as module
from domino_spec.engine.model_runner import ModelRunner, Plan
from domino_spec.engine.policy import Costs, DepthPolicy, depths
from tests.engine.replays import Replays
from tests.engine.runs import make_engine
from tests.support.families import make_target, random_drafter


def runner_of(engine, *, graphs):
    return ModelRunner(engine.target, engine.drafter, engine.slots, graphs=graphs)


def recorded_by(engine, *, graphs=True):
    runner, found = runner_of(engine, graphs=graphs), []

    def capture(size, plan):
        found.append((size, plan))
        runner._cycles[size, plan] = None

    runner.capture_cycle = capture
    runner.capture_prefill = lambda *_, **__: None
    engine.runner = runner
    return found


def test_every_size_that_rows_may_shrink_to_is_recorded_once():
    engine = make_engine(make_target("llama"), random_drafter(), slots=5)
    found = recorded_by(engine)
    engine.capture(5, SamplingParams())
    assert found == [(size, Plan(7)) for size in (8, 4, 2, 1)]
    engine.capture(3, SamplingParams())
    assert len(found) == 4
    engine.capture(1, SamplingParams(temperature=0.7, top_p=0.9))
    assert found[4:] == [(1, Plan(7, sampled=True, uncoupled=True, filtered=True))]


def test_a_policy_may_choose_any_depth():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    found = recorded_by(engine)
    engine.policy = DepthPolicy(Costs({1: dict.fromkeys(depths(7), 1.0)}), 7)
    engine.capture(1, SamplingParams())
    assert [plan.depth for _, plan in found] == list(depths(7))


def test_a_policy_may_choose_trees_and_budgets():
    """Trees are no deeper than the drafter, and budgets are shared by four and more."""
    engine = make_engine(make_target("llama"), random_drafter(), slots=4, tree=15)
    found = recorded_by(engine)
    engine.policy = DepthPolicy(Costs({1: dict.fromkeys(depths(7), 1.0)}), 7, 15)
    engine.capture(4, SamplingParams())
    assert {(plan.depth, plan.nodes) for _, plan in found if plan.nodes} == {
        (3, 3),
        (7, 7),
        (7, 15),
    }
    packed = [(size, plan.depth, plan.budget) for size, plan in found if plan.budget]
    assert packed == [(4, 3, 1), (4, 5, 2), (4, 7, 3), (4, 7, 5)]


def test_what_sequences_without_drafts_will_run_is_recorded():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    found = recorded_by(engine)
    engine.policy = DepthPolicy(Costs({1: dict.fromkeys(depths(7), 1.0)}), 7)
    engine.capture(1, SamplingParams(), speculate=False)
    assert found == [(1, Plan(0, alone=True))]


def test_without_graphs_and_without_a_drafter():
    engine = make_engine(make_target("llama"), None, slots=2)
    found = recorded_by(engine)
    engine.capture(2, SamplingParams())
    assert found == [(2, Plan(0)), (1, Plan(0))]
    nothing = recorded_by(engine, graphs=False)
    engine.capture(2, SamplingParams())
    assert nothing == []


def test_of_too_many_kinds_the_least_used_goes(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(module, "_read_back", lambda report, rows: lambda: report[:rows])
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    runner = runner_of(engine, graphs=True)
    runner.recorder = Replays()
    for depth in (1, 2, 3, 1, 4):  # 1 is used again, so 2 has to go
        runner.start_cycle([0], Plan(depth))()
    assert [plan.depth for _, plan in runner._cycles] == [3, 1, 4]
    before = len(runner.recorder.outputs)
    runner.start_cycle([0], Plan(3))()
    assert len(runner.recorder.outputs) == before
    runner.start_cycle([0], Plan(2))()  # recorded anew
    assert [plan.depth for _, plan in runner._cycles] == [4, 3, 2]
    runner.capture_cycles(2, Plan(5))
    assert len(runner._cycles) == 3


def test_trees_are_recorded_for_batches_that_may_choose_them():
    engine = make_engine(make_target("llama"), random_drafter(), slots=16, tree=7)
    found = recorded_by(engine)
    costs = dict.fromkeys(depths(7), 1.0)
    engine.policy = DepthPolicy(Costs({1: costs}, trees={1: {3: 1.0, 7: 1.0}}), 7, 7)
    engine.capture(16, SamplingParams())
    assert {size for size, plan in found if plan.nodes} == {1, 2, 4, 8}
    assert {size for size, plan in found if not plan.nodes} == {1, 2, 4, 8, 16}
    assert {(plan.depth, plan.nodes) for _, plan in found if plan.nodes} == {(3, 3), (7, 7)}
