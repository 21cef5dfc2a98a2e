"""What is timed for each kind of cycle, and what measuring leaves behind."""

import math
from dataclasses import replace

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafters import BlockDrafter
from domino_spec.engine import calibration
from domino_spec.engine.calibration import measure_extras
from domino_spec.engine.measure import Bench
from domino_spec.engine.model_runner import KINDS, ModelRunner, Plan
from tests.engine.runs import make_engine, run_engine, run_reference
from tests.support.families import make_target, random_drafter, random_prompts

PROMPTS = random_prompts([6, 9])
PENALISED = {"max_new_tokens": 20, "presence_penalty": 1.5}


@pytest.fixture
def bench():
    return Bench(make_engine(make_target("llama"), random_drafter(), slots=2), context=32)


def columns(slots):
    return {name: value.clone() for name, value in vars(slots).items() if torch.is_tensor(value)}


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def test_every_kind_is_measured_at_every_depth_and_deeper_adds_no_less(bench):
    found = measure_extras(bench, 2, (0, 3, 7))
    assert tuple(found) == KINDS
    for spent in found.values():
        assert tuple(spent) == (0, 3, 7)
        assert 0 <= spent[0] <= spent[3] <= spent[7]
    assert found["sampled"][7] > 0


def test_extras_are_differences_of_what_differs(bench, monkeypatch):
    """Filters come on top of sampling, ranks on top of scores; drafts are drawn too."""
    seconds = {
        "choice": {(): 1.0, ("sampled",): 3.0, ("sampled", "filtered"): 8.0, ("penalised",): 2.5,
                   ("scored",): 0.5, ("scored", "ranked"): 1.75, ("sampled", "uncoupled"): 3.5},
        "drafts": {(): 10.0, ("sampled",): 14.0},
    }  # fmt: skip
    monkeypatch.setattr(
        calibration, "_timed", lambda _, parts: {(n, p): seconds[n][p.kinds] for n, p in parts}
    )
    assert measure_extras(bench, 1, (7,)) == {
        "sampled": {7: 6.0}, "uncoupled": {7: 0.5}, "filtered": {7: 5.0}, "penalised": {7: 1.5},
        "scored": {7: 0.0}, "ranked": {7: 1.25},
    }  # fmt: skip
    assert measure_extras(bench, 1, (0,))["sampled"] == {0: 2.0}, "nothing is drafted"


def test_what_does_not_fit_into_memory_is_not_to_be_chosen(bench, monkeypatch):
    def timed(_, parts):
        depth = next(iter(parts))[1].depth
        if depth > fits:
            raise torch.OutOfMemoryError("too much")
        return {(name, plan): 1.0 + depth + len(plan.kinds) for name, plan in parts}

    monkeypatch.setattr(calibration, "_timed", timed)
    fits = 3
    found = measure_extras(bench, 1, (0, 3, 7))
    assert found["sampled"] == {0: 1.0, 3: 2.0, 7: math.inf}
    assert found["filtered"] == {0: 1.0, 3: 1.0, 7: math.inf}
    fits = -1
    with pytest.raises(torch.OutOfMemoryError):
        measure_extras(bench, 1, (0, 3))


def test_a_part_that_does_not_fit_costs_its_own_kind_alone(bench, monkeypatch):
    def timed(_, parts):
        return {
            (name, plan): math.inf if plan.filtered and plan.depth else 1.0 + len(plan.kinds)
            for name, plan in parts
        }

    monkeypatch.setattr(calibration, "_timed", timed)
    found = measure_extras(bench, 1, (0, 3))
    assert found["filtered"] == {0: 1.0, 3: math.inf}
    assert found["sampled"] == {0: 1.0, 3: 2.0}
    assert found["ranked"] == {0: 1.0, 3: 1.0}


def test_on_a_gpu_a_part_is_asked_whether_it_fits(bench, monkeypatch):
    def seconds_of(call, _device):
        if call == "large":
            raise torch.OutOfMemoryError("too much")
        return 1.0

    monkeypatch.setattr(calibration, "seconds_of", seconds_of)
    assert calibration._seconds_if_it_fits(bench, Plan(3), "small") == 1.0
    assert calibration._seconds_if_it_fits(bench, Plan(3), "large") == math.inf
    with pytest.raises(torch.OutOfMemoryError):  # a plain step has to
        calibration._seconds_if_it_fits(bench, Plan(0), "large")


def test_measured_rows_do_the_work_of_their_kind(bench, monkeypatch):
    """With neutral values in the slots a kernel might leave it out."""
    seen, drawn = {}, set()
    choose, roll_out = ModelRunner.choose, BlockDrafter._roll_out

    def chosen(cycle, logits, drafted, draws, plan):
        rows = drafted.metadata
        assert bool(drafted.drawn_from) == (plan.uncoupled and plan.depth > 0)
        seen[plan] = (draws, tuple(logits.shape[:2]))
        if plan.penalised:
            assert bool((cycle.slots.penalties.presence[rows.slots] != 0).all())
        return choose(cycle, logits, drafted, draws, plan)

    def rolled(drafter, hidden, anchors, rows, draws):
        drawn.add((hidden.shape[1], draws.temperature is not None))
        return roll_out(drafter, hidden, anchors, rows, draws)

    monkeypatch.setattr(ModelRunner, "choose", chosen)
    monkeypatch.setattr(BlockDrafter, "_roll_out", rolled)
    measure_extras(bench, 2, (0, 5))
    assert drawn == {(5, False), (5, True)}
    assert {plan.depth for plan in seen} == {0, 5}
    assert len(seen) == 2 * (1 + len(KINDS))
    for plan, (draws, shape) in seen.items():
        assert shape == (2, plan.depth + 1)
        assert (draws.temperature is not None) == plan.sampled
        assert (draws.top_k is not None) == plan.filtered
        if plan.sampled:
            assert bool((draws.temperature > 0).all())
        if plan.filtered:
            assert bool((draws.top_k > 0).all() & (draws.top_p < 1).all() & (draws.min_p > 0).all())


def test_slots_hold_afterwards_what_they_held_before(bench):
    slots = bench.engine.slots
    slots.temperature[0], slots.top_p[1], slots.lengths[0] = 0.3, 0.5, 17
    before = columns(slots)
    measure_extras(bench, 2, (0, 7))
    assert same(columns(slots), before)
    assert slots._penalties is None, "counts for every token are kept for no one"


def test_a_measurement_that_fails_leaves_nothing_behind_either(bench, monkeypatch):
    before = columns(bench.engine.slots)
    monkeypatch.setattr(ModelRunner, "report", None)
    with pytest.raises(TypeError):
        measure_extras(bench, 1, (3,))
    assert same(columns(bench.engine.slots), before)
    assert bench.engine.slots._penalties is None


def test_penalties_that_were_there_stay_where_they_are():
    """Captured graphs keep their addresses."""
    target = make_target("qwen3")
    expected, _, _ = run_reference(target, None, PROMPTS, **PENALISED)
    engine = make_engine(target, random_drafter(), slots=2)
    assert run_engine(engine, PROMPTS, **PENALISED)[0] == expected
    penalties = engine.slots._penalties
    before = {name: value.clone() for name, value in vars(penalties).items()}
    measure_extras(Bench(engine, context=32), 2, (0, 7))
    assert engine.slots._penalties is penalties
    assert same(vars(penalties), before)
    assert run_engine(engine, PROMPTS, **PENALISED)[0] == expected


def test_a_plan_knows_its_kinds():
    assert Plan(7).kinds == ()
    params = [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9, logprobs=2)]
    kinds = ("sampled", "uncoupled", "filtered", "scored", "ranked")
    assert Plan.of(params, 7, alone=False).kinds == kinds
    assert Plan.of(params, 7, alone=False).mixed, "the greedy one draws nothing"
    coupled = [replace(each, accept="coupled") for each in params]
    assert Plan.of(coupled, 7, alone=False).kinds == ("sampled", *kinds[2:])
