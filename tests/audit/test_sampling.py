"""The distribution test passes a right decoder and sees each wrong one, at a stated price."""

import numpy as np
import pytest
import torch

from domino_spec.audit import Audit, EngineWay, ReferenceWay, audit_sampling
from domino_spec.audit.chance import after_many_texts, after_one_text, holm, run_test
from domino_spec.decoding import SamplingParams
from domino_spec.decoding.sampling import Sampler
from domino_spec.drafters import BlockDrafter
from domino_spec.errors import InputError
from tests.engine.runs import make_engine
from tests.support.broken_rules import (
    accept_the_likeliest,
    accept_too_easily,
    always_accept,
    resample_from_p,
)
from tests.support.small import VOCAB, small_pair

PROMPTS = [[3, 7, 1], [5, 2, 8, 4, 9]]
HOT = {"temperature": 1.0, "seed": 0}


@pytest.fixture(scope="module")
def small():
    return small_pair()


def way_of(small):
    target, drafter = small
    return ReferenceWay(target, BlockDrafter(drafter).with_depth(3), batch_size=50)


def sampled(small, way, *, samples=150, prompts=PROMPTS, **params):
    return audit_sampling(
        small[0], way, prompts, params=SamplingParams(**HOT | params), samples=samples, positions=4
    )


@pytest.mark.parametrize(
    "params",
    [
        {"accept": "block"},
        {"accept": "match"},
        {"accept": "coupled", "temperature": 0.8},
        {"accept": "rejection", "top_k": 5, "top_p": 0.9},
    ],
)
def test_a_right_decoder_passes(small, params):
    found = sampled(small, way_of(small), **params)
    audit = Audit(greedy=None, sampling=found)
    assert audit.answer == "lossless"
    assert len(found.places) == 8
    assert sum(found.stats.accepted) > 50
    assert found.false_alarm == pytest.approx(1e-4)
    assert 0 < found.detectable < 0.4


def test_a_seed_gives_the_same_answer(small):
    first, again = (sampled(small, way_of(small), samples=30) for _ in range(2))
    assert first.places == again.places


def test_the_engine_passes(small):
    target, drafter = small
    way = EngineWay(make_engine(target, drafter, slots=50, capacity=32))
    found = sampled(small, way, accept="coupled")
    assert found.wrong == ()
    assert sum(found.stats.accepted) > 100


def drafts_greedily(self, start):
    """Greedy drafts, checked as if they had been drawn."""
    return 0.0, 0


BROKEN = {
    "accepts always": ("accept_or_resample", always_accept),
    "resamples from p": ("accept_or_resample", resample_from_p),
    "accepts too easily": ("accept_or_resample", accept_too_easily),
    "drafts greedily": ("draft_noise", drafts_greedily),
    "accepts the likeliest": ("accept_or_resample", accept_the_likeliest),
}
QUICK = ("accepts always",)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in BROKEN],
)
def test_a_broken_decoder_is_called_so(small, kind, monkeypatch):
    name, broken = BROKEN[kind]
    monkeypatch.setattr(Sampler, name, broken)
    samples = 600 if kind in ("resamples from p", "accepts the likeliest") else 300
    found = sampled(small, way_of(small), samples=samples, prompts=PROMPTS[:1], accept="rejection")
    assert found.wrong, [place.test.p for place in found.places]
    assert all(place.position > 0 for place in found.wrong)  # the prefill has no drafts
    audit = Audit(greedy=None, sampling=found)
    assert (audit.answer, audit.exit_code) == ("bug", 1)


def test_what_makes_no_sense_is_refused(small):
    with pytest.raises(InputError, match="temperature is 0"):
        sampled(small, way_of(small), temperature=0.0)
    with pytest.raises(InputError, match="5 samples"):
        sampled(small, way_of(small), samples=5)


# The statistics alone --------------------------------------------------------------------------


def drawn(seed, *, shared, greedy=0.0):
    """Tokens from known probabilities, some of them replaced by the likeliest."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.softmax(torch.randn(1 if shared else 80, VOCAB, generator=generator), dim=1)
    tokens = torch.multinomial(chances.expand(80, -1), 1, generator=generator).squeeze(1)
    best = chances.argmax(dim=1).expand(80)
    replaced = torch.rand(80, generator=generator) < greedy
    return chances, torch.where(replaced, best, tokens)


def p_value(seed, *, shared, greedy=0.0):
    rng = np.random.default_rng(seed)
    chances, tokens = drawn(seed, shared=shared, greedy=greedy)
    group = after_one_text(chances[0], tokens) if shared else after_many_texts(chances, tokens, rng)
    return run_test([group], level=0.05, draws=199, rng=rng)


@pytest.mark.parametrize("shared", [True, False])
def test_p_values_are_uniform_when_nothing_is_wrong(shared):
    ps = [p_value(seed, shared=shared).p for seed in range(150)]
    for level in (0.1, 0.5):
        share = sum(p <= level for p in ps) / len(ps)
        assert abs(share - level) < 4 * (level * (1 - level) / len(ps)) ** 0.5


@pytest.mark.parametrize("shared", [True, False])
def test_the_stated_variation_is_found_nine_times_in_ten(shared):
    found, total = 0, 40
    for seed in range(total):
        clean = p_value(seed, shared=shared)
        chances, _ = drawn(seed, shared=shared)
        greedy = clean.detectable / float((1 - chances.max(dim=1).values).mean())
        found += p_value(seed, shared=shared, greedy=greedy).p <= 0.05
    assert 0.75 * total <= found < total


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_cells_follow_from_the_probabilities_and_hold_enough():
    chances = torch.tensor([0.5, 0.0, 0.3, 0.1, 0.06, 0.03, 0.01])
    group = after_one_text(chances, torch.tensor([0] * 100))
    assert (group.expected >= 5).all()
    assert group.expected.sum() == pytest.approx(100)
    assert after_one_text(torch.tensor([1.0, 0.0]), torch.tensor([0] * 50)) is None
