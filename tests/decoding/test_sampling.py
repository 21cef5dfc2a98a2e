"""Sampling is exact: the distribution is the target's own, and the test notices when it is not."""

import math
from collections import Counter

import pytest
import torch

from domino_spec import DominoGenerate
from domino_spec.decoding import SamplingParams, Sequence, decode, make_sampler
from domino_spec.decoding.sampling import Sampler
from domino_spec.decoding.stopping import at_length
from domino_spec.drafters import BlockDrafter
from domino_spec.errors import InputError
from tests.support.broken_rules import accept_by_p_alone, always_accept, resample_from_p
from tests.support.distribution import deviations, enumerated
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import run
from tests.support.small import small_pair

ROWS, RUNS, NEW = 200, 5, 4
PROMPT = [3, 7, 1]


@pytest.fixture(scope="module")
def small():
    return small_pair()


def sample_pairs(target, drafter, params: SamplingParams):
    """Second and third tokens of many rows, sampled in ragged batches."""
    pairs, accepted, offered = Counter(), 0, 0
    for number in range(RUNS):
        rows = [
            Sequence(PROMPT, params, index=number * ROWS + index, stop_rules=[at_length()])
            for index in range(ROWS)
        ]
        proposer = BlockDrafter(drafter).with_depth(3)
        for _ in decode(target, proposer, rows):
            pass
        for row in rows:
            pairs[row.output[1], row.output[2]] += 1
            accepted += sum(row.stats.accepted)
            offered += sum(row.stats.offered)
    return pairs, accepted / offered


REJECTION, BLOCK = {"accept": "rejection"}, {"accept": "block"}
PENALTIES = {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.6}
PARAMS = {
    "top-p": {"temperature": 0.9, "top_p": 0.8} | REJECTION,
    "top-k and min-p": {"temperature": 1.3, "top_k": 7, "min_p": 0.05} | REJECTION,
    "penalty": PENALTIES | REJECTION,
    "block": {"temperature": 0.9, "top_p": 0.8} | BLOCK,
    "block, penalty": PENALTIES | BLOCK,
    "match": {"temperature": 0.9, "top_p": 0.8, "accept": "match"},
    "coupled": {"temperature": 0.9, "top_p": 0.8, "accept": "coupled"},
    "coupled, penalty": {"temperature": 1.0, "repetition_penalty": 1.5, "accept": "coupled"},
}


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case == "block, penalty" else pytest.mark.slow)
    for case in PARAMS
])  # fmt: skip
def test_samples_follow_the_targets_distribution(small, case):
    target, drafter = small
    params = SamplingParams(max_new_tokens=NEW, seed=11, **PARAMS[case])
    exact = enumerated(target, params, PROMPT, 3)
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    pairs, rate = sample_pairs(target, drafter, params)
    assert 0.02 < rate < 0.9, "drafts must be both accepted and rejected for the test to see"
    assert deviations(pairs, exact) < 4


def test_transformers_generate_samples_the_same_distribution(small):
    target, drafter = small
    params = SamplingParams(temperature=0.9, top_p=0.8)
    domino = DominoGenerate(drafter)
    pairs = Counter()
    torch.manual_seed(3)
    for _ in range(RUNS):
        found = target.model.generate(
            torch.tensor([PROMPT] * ROWS), attention_mask=torch.ones(ROWS, 3), do_sample=True,
            temperature=0.9, top_p=0.8, top_k=0, max_new_tokens=NEW, pad_token_id=0,
            custom_generate=domino,
        )  # fmt: skip
        pairs.update((int(row[4]), int(row[5])) for row in found)
    assert deviations(pairs, enumerated(target, params, PROMPT, 3)) < 4


BROKEN = {
    "always accept": always_accept,
    "resample from p": resample_from_p,
    "accept by p alone": accept_by_p_alone,
}


@pytest.mark.parametrize("kind", [
    pytest.param("always accept", marks=pytest.mark.slow),
    pytest.param("accept by p alone", marks=pytest.mark.slow),
    pytest.param("resample from p", marks=pytest.mark.slow),  # the audit has it too
])  # fmt: skip
def test_a_wrong_accept_rule_is_noticed(small, monkeypatch, kind):
    target, drafter = small
    monkeypatch.setattr(Sampler, "accept_or_resample", BROKEN[kind])
    params = SamplingParams(max_new_tokens=NEW, seed=11, **PARAMS["top-p"])
    pairs, _ = sample_pairs(target, drafter, params)
    assert deviations(pairs, enumerated(target, params, PROMPT, 3)) > 6


def test_seeds_repeat_and_rows_differ():
    target = make_target("llama")

    def once(seed):
        proposer = BlockDrafter(random_drafter()).with_depth(7)
        prompts = [random_prompts((6,))[0]] * 3
        return run(target, proposer, prompts, max_new_tokens=20, temperature=1.0, seed=seed)[0]

    assert once(1) == once(1)
    assert once(1) != once(2)
    assert len({tuple(row) for row in once(1)}) == 3


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_drafts_of_a_drafter_that_agrees_are_all_accepted(rule):
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    params = SamplingParams(temperature=0.7, seed=0, accept=rule)
    sampler = make_sampler(Sequence([1], params, index=0))
    scores = p.log() / 0.7
    for start in range(1, 200):
        heat, seed = sampler.draft_noise(start)
        draft = int((p.log() / heat + sampler._noise(seed, start + 1, p)).argmax())
        q = sampler.distribution(p.log(), None).dense(4)
        if rule == "coupled":
            assert sampler.choose(scores, start + 1) == draft
        elif rule == "rejection":
            found = sampler.accept_or_resample(scores.softmax(-1), q, draft, start + 1, start)
            assert found == (draft, True)
        else:
            assert sampler.verify_block([scores.softmax(-1)] * 2, [q], [draft], start)[0] == 1


def test_without_a_seed_whole_blocks_are_verified_and_a_seed_keeps_its_text():
    hot = {"temperature": 1.0}
    assert SamplingParams(**hot).rule == "block"
    assert SamplingParams(**hot, seed=1).rule == "coupled"
    assert SamplingParams(**hot, hooks=(lambda prompt, output, logits: logits,)).rule == "coupled"
    assert SamplingParams(**hot, seed=1, accept="rejection").rule == "rejection"
    with pytest.raises(InputError, match="'block' with processors or hooks"):
        SamplingParams(**hot, accept="block", hooks=(lambda prompt, output, logits: logits,))


@pytest.mark.parametrize("rule", ["coupled", "match"])
def test_a_seed_gives_the_same_text_with_a_drafter_and_without(small, rule):
    target, drafter = small
    params = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 9, "accept": rule}
    for seed in (1, 2**40):
        texts = [
            run(target, proposer, [[5, 9], [7]], seed=seed, **params)[0]
            for proposer in (None, BlockDrafter(drafter).with_depth(4))
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; expected a finite number"),
        ({"frequency_penalty": "much"}, "frequency_penalty is 'much'"),
        ({"frequency_penalty": True}, "frequency_penalty is True"),
        ({"stop": ("",)}, "empty stop string"),
        ({"accept": "always"}, "accept is 'always'"),
        ({"max_new_tokens": 3.5}, "max_new_tokens is 3.5"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"seed": 2**70}, "seed is"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": (3,)}, "stop holds 3"),
        ({"processors": (3,)}, "processors holds 3"),
        ({"logprobs": -1}, "logprobs is -1; expected None or a whole number from 0 to 20"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"logprobs": 1.5}, "logprobs is 1.5"),
    ],
)
def test_bad_parameters_are_named(params, words):
    with pytest.raises(InputError, match=words):
        SamplingParams(**params)
