"""Costs are measured once a machine and kept; depth follows them; results do not change."""

import json

import pytest

from domino_spec.fast import calibration
from domino_spec.fast.calibration import adapt_depth
from domino_spec.fast.kept import cache_folder
from domino_spec.fast.policy import DepthPolicy, depths
from tests.fast.runs import make_engine, run_engine, run_reference
from tests.support.families import drafter_config, make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter

PROMPTS = random_prompts([3, 9, 5])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    return tmp_path


def test_costs_are_measured_once_and_kept(cache, monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2)
    policy = adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    kept = json.loads(path.read_text())
    assert {int(batch) for batch in kept} == {1, 2}
    assert tuple(int(depth) for depth in kept["1"]) == depths(7)
    monkeypatch.setattr(calibration, "measure_costs", None)  # nothing is measured again
    again = make_engine(make_target("llama"), random_drafter(), slots=2)
    assert adapt_depth(again).costs(2) == policy.costs(2)


def test_another_drafter_is_measured_anew(cache):
    for changes in ({}, {"block_size": 6}):
        drafter = random_drafter(drafter_config(**changes))
        adapt_depth(make_engine(make_target("llama"), drafter, slots=1))
    assert len(list((cache / "costs").iterdir())) == 2


@pytest.mark.parametrize("change", ["version", "DOMINO_KERNELS", "DOMINO_OVERLAP"])
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


@pytest.mark.parametrize("spoiled", ["", "[1, 2]", '{"1": 5}', "{"])
def test_a_spoiled_file_is_measured_again(cache, spoiled):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    first = adapt_depth(engine)
    (path,) = (cache / "costs").iterdir()
    path.write_text(spoiled)
    assert set(adapt_depth(engine).costs(1)) == set(first.costs(1))
    assert json.loads(path.read_text()).keys() == {"1"}


def test_a_busy_moment_is_not_believed(cache, monkeypatch):
    """Whoever else worked on the machine made a shallow cycle dearer than a deep one."""
    busy = {0: 9.0, 1: 2.0, 2: 7.0, 3: 3.0, 5: 4.0, 7: 5.0}
    monkeypatch.setattr(calibration, "measure_costs", lambda engine, batches: {1: busy})
    policy = adapt_depth(make_engine(make_target("llama"), random_drafter(), slots=1))
    assert policy.costs(1) == {0: 2.0, 1: 2.0, 2: 3.0, 3: 3.0, 5: 4.0, 7: 5.0}


def test_without_a_drafter_there_is_nothing_to_choose():
    assert adapt_depth(make_engine(make_target("llama"), None)) is None


def test_the_cache_has_a_place_of_its_own(monkeypatch):
    monkeypatch.delenv("DOMINO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache_folder()) == "/somewhere/domino-spec"


@pytest.mark.parametrize("ahead", [False, True])
def test_changing_depths_change_no_token(ahead):
    target = make_target("qwen3")
    expected, _, _ = run_reference(
        target, None, PROMPTS, depth=0, candidates=None, max_new_tokens=30
    )
    engine = make_engine(target, random_drafter(), slots=2, ahead=ahead)
    turns = iter([7, 0, 3, 0, 0, 1, 7, 2] * 50)

    class Restless(DepthPolicy):
        def choose(self, rows):
            return next(turns)

    engine.policy = Restless({1: {0: 1.0}}, 7)
    found, _, _ = run_engine(engine, PROMPTS, max_new_tokens=30)
    assert found == expected


def test_a_drafter_that_knows_is_given_its_whole_block():
    engine = make_engine(bigram_target(), knowing_drafter(shift=True, prefix=1), slots=1)
    costs = {1: {0: 1.0, 1: 1.02, 3: 1.1, 7: 1.2}}
    engine.policy = DepthPolicy(costs, 7)
    _, counts, _ = run_engine(engine, [[1, 2]], max_new_tokens=60)
    assert counts.tokens_per_cycle > 7
