"""Depth where none is set: the engine drafts as far as it pays, and says where it does not."""

import warnings

import pytest
import torch

from domino_spec import DominoDecoder
from domino_spec.api import NoGainNotice, UselessDrafterWarning
from domino_spec.engine import calibration, policy
from domino_spec.engine.policy import Costs, depths
from tests.engine.runs import own
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter

(PROMPT,) = random_prompts([5])
FREE = {depth: 0.010 + 0.0001 * depth for depth in depths(7)}
EXPENSIVE = {depth: 0.010 + 0.009 * depth for depth in depths(7)}


@pytest.fixture
def costing(monkeypatch):
    """Cycles of this machine cost what a test says."""

    def cost(costs):
        monkeypatch.setattr(
            calibration,
            "costs_of",
            lambda engine, batches, **_: Costs(dict.fromkeys(batches, costs)),
        )
        monkeypatch.setattr(policy.DepthPolicy, "observe", lambda *_: None)

    return cost


def unsure(**options):
    return DominoDecoder(own(make_target("llama")), random_drafter(), engine="fast", **options)


def test_a_drafter_that_knows_drafts_its_whole_block(costing):
    costing(FREE)
    decoder = DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1), engine="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = decoder.generate([4, 9], max_new_tokens=161)
    assert decoder.adapts
    assert result.stats.cycles == 20


def test_drafts_that_do_not_pay_are_left_out_and_that_is_said_once(costing):
    costing(EXPENSIVE)
    decoder = unsure()
    plain = decoder.generate(PROMPT, max_new_tokens=80, ignore_eos=True, speculate=False)
    words = (
        r"with one sequence a plain step takes 10\.0 ms and a cycle of 1 draft 19\.0 ms, "
        r"so it would have to commit 1\.90 tokens, and 1\.\d\d are likely"
    )
    with pytest.warns(NoGainNotice, match=words) as told:
        found = decoder.generate(PROMPT, max_new_tokens=80, ignore_eos=True)
    assert [warning.filename for warning in told] == [__file__]
    assert found.tokens == plain.tokens
    assert 4 <= found.stats.drafted <= 20
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoGainNotice)
        decoder.generate(PROMPT, max_new_tokens=80, ignore_eos=True)


def test_what_is_given_up_for_some_rows_only_is_said_of_them(monkeypatch):
    """Drafts pay for greedy rows here, and cost too much where tokens are drawn."""
    expensive = {"sampled": {1: {0: 0.002, 7: 0.5}}}
    monkeypatch.setattr(
        calibration, "costs_of", lambda engine, batches, **_: Costs({1: FREE}, expensive)
    )
    monkeypatch.setattr(policy.DepthPolicy, "observe", lambda *_: None)
    decoder = DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1), engine="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoder.generate([4, 9], max_new_tokens=161).stats.cycles == 20
    with pytest.warns(NoGainNotice, match=r"one sequence \(sampled\) a plain step takes 12\.0 ms"):
        result = decoder.generate([4, 9], max_new_tokens=80, temperature=0.01, seed=1)
    assert result.stats.drafted <= 1


def test_a_useless_drafter_is_noticed_though_it_seldom_drafts(costing, monkeypatch):
    """Over several runs: each of them alone drafts too little to tell."""
    costing(EXPENSIVE)
    monkeypatch.setattr(policy, "_RETRY", 8)
    decoder = unsure()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            result = decoder.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
            assert not result.run.useless
    kinds = [warning.category for warning in said]
    assert kinds.count(NoGainNotice) == 1
    assert UselessDrafterWarning in kinds


def test_a_good_drafter_that_does_not_pay_is_not_called_useless(costing):
    costing({depth: 0.010 * (1 + 4 * depth) for depth in depths(7)})
    decoder = DominoDecoder(bigram_target(), knowing_drafter(shift=True, prefix=1), engine="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UselessDrafterWarning)
        warnings.simplefilter("ignore", NoGainNotice)
        result = decoder.generate([4, 9], max_new_tokens=120)
    assert result.stats.tokens_per_cycle == 1.0


def test_a_depth_that_is_given_is_kept_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(calibration, "costs_of", None)
    decoder = unsure(depth=3)
    assert not decoder.adapts
    result = decoder.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert len(result.stats.offered) == 3
    assert result.stats.drafted == result.stats.cycles


def test_without_drafts_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(calibration, "costs_of", None)
    unsure().generate(PROMPT, max_new_tokens=4, speculate=False)
    DominoDecoder(own(make_target("llama")), None).generate(PROMPT, max_new_tokens=4)


def test_measured_costs_serve_the_next_decoder(monkeypatch, tmp_path):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    answers = [unsure().generate(PROMPT, max_new_tokens=9)]
    monkeypatch.setattr(calibration, "measure_costs", None)
    answers.append(unsure().generate(PROMPT, max_new_tokens=9))
    assert answers[0].tokens == answers[1].tokens


def test_inference_mode_around_the_first_run_is_no_trap(costing):
    costing(FREE)
    decoder = unsure()
    with torch.inference_mode():
        first = decoder.generate(PROMPT, max_new_tokens=9)
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == first.tokens
