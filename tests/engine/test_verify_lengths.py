"""Verify length by sequence: the same tokens, the target's distribution, more of it at a cost."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafters import drafter_of
from domino_spec.drafters.block import BlockDrafter
from domino_spec.engine import model_runner, verify_lengths
from domino_spec.engine.kernels import lengths
from domino_spec.engine.policy import Batch, Costs, DepthPolicy, Drafts
from domino_spec.engine.sampling import RULES
from tests.engine.replays import Replays
from tests.engine.runs import make_engine, run_engine, run_reference
from tests.engine.test_accept import DRAWN, HOT, sampled
from tests.golden.pairs import KINDS, model_of, prompts, target_of
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.small import small_pair

NEW = 16
PROMPTS = random_prompts([3, 9, 5, 4])
PARAMS = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "logit_bias": {3: 2.0}, "min_tokens": 9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 2},
)


class Always(DepthPolicy):
    """One budget, wherever lengths may differ."""

    def __init__(self, depth, budget):
        super().__init__(Costs({1: {0: 1.0, depth: 1.0}}), depth)
        self.budget, self.cycles = budget, 0

    def choose(self, batch):
        self.cycles += batch.ragged
        return Drafts(self._depth, budget=self.budget if batch.ragged else 0)


def run_ragged(target, drafter, given, *, budget, graphs=False, **params):
    """Texts of an engine whose batches have this budget, with their drafts by sequence."""
    engine = make_engine(target, drafter)
    if graphs:
        engine.runner._graphs, engine.runner.recorder = True, Replays()
        engine.ahead = True
    engine.policy = Always(engine.depth, budget)
    seeds = [11 + row for row in range(len(given))]
    texts, counts, _ = run_engine(engine, given, seeds=seeds, max_new_tokens=NEW, **params)
    assert engine.policy.cycles
    return texts, counts


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "phi3", "qwen3_5_text"])
def test_no_family_minds_a_budget(family):
    """Windows, rotary positions, sinks and states of packed tokens; experts of a few of them."""
    target = make_target(family)
    expected, _, _ = run_reference(target, None, PROMPTS, max_new_tokens=NEW)
    assert run_ragged(target, random_drafter(), PROMPTS, budget=2)[0] == expected


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "biased", "penalised"])
def test_texts_are_the_reference_loops(params):
    target, drafter = make_target("qwen3"), random_drafter()
    common = {"accept": "coupled", **params}
    expected, whole, _ = run_reference(
        target, drafter, PROMPTS, seed=11, max_new_tokens=NEW, **common
    )
    found, counts = run_ragged(target, drafter, PROMPTS, budget=2, **common)
    assert found == expected
    assert sum(counts.offered) < sum(whole.offered)
    if params:
        assert sum(counts.accepted) > 0


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("domino", "eagle3") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
        if kind != "lookup"
    ],
)
def test_sequences_of_all_rules_share_a_budget(kind):
    """With every drafter that has logits; what draws its drafts has other tokens than plainly."""
    rules = ({}, *({"temperature": 0.7, "accept": rule} for rule in RULES), {"top_k": 3},
             {"repetition_penalty": 1.2})  # fmt: skip
    params = [SamplingParams(max_new_tokens=2 * NEW, **each) for each in rules]
    given, seeds = (prompts() * 3)[: len(params)], list(range(11, 11 + len(params)))
    plain, _, _ = run_engine(make_engine(target_of("llama")), given, seeds=seeds, params=params)
    engine = make_engine(target_of("llama"), drafter_of(model_of(kind)))
    engine.policy = Always(engine.depth, 1)
    found, counts, _ = run_engine(engine, given, seeds=seeds, params=params)
    assert engine.policy.cycles
    assert sum(counts.accepted) > 0
    for own, one, other in zip(params, found, plain, strict=True):
        assert len(one) == len(other)
        assert one == other or own.accept in DRAWN


def test_the_policy_hears_what_was_promised_and_kept(monkeypatch):
    """What a cycle of the report says, by sequence."""
    engine = make_engine(make_target("llama"), random_drafter())
    engine.policy = Always(engine.depth, 2)
    heard, reports = [], []
    monkeypatch.setattr(engine.policy, "record_lengths", lambda *told: heard.append(told))
    run_cycle = engine.runner.run_cycle
    monkeypatch.setattr(
        engine.runner, "run_cycle", lambda *given: reports.append(run_cycle(*given)) or reports[-1]
    )
    _, counts, _ = run_engine(engine, PROMPTS, max_new_tokens=12, temperature=0.8)
    ragged = [each for each in reports if each.shape[1] == 2 * engine.depth + 3]
    assert len(heard) == len(ragged) > 1
    for (batch, promised, budget, accepted), report in zip(heard, ragged, strict=True):
        assert batch.ragged
        assert budget == 2
        assert accepted == pytest.approx(report[:, 0].float().mean().item())
        assert promised == pytest.approx((report[0, engine.depth + 3 :] / 1e6).tolist())
        assert report[:, engine.depth + 2].sum() == 2 * len(report)
    whole = [each for each in reports if each.shape[1] != 2 * engine.depth + 3]
    assert sum(counts.offered) <= sum(2 * len(r) for r in ragged) + engine.depth * sum(
        map(len, whole)
    )


def test_captured_cycles_and_those_that_fill_up_a_batch_change_nothing(monkeypatch):
    """Five sequences run as eight."""
    monkeypatch.setattr(model_runner, "_read_back", lambda report, n: report[:n].clone().cpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    target, drafter, given = make_target("llama"), random_drafter(), [*PROMPTS, PROMPTS[1]]
    for common in ({"accept": "coupled"}, {"accept": "match", "repetition_penalty": 1.2}):
        how = {"budget": 2, "temperature": 0.8, **common}
        expected = run_ragged(target, drafter, given, **how)[0]
        assert run_ragged(target, drafter, given, graphs=True, **how)[0] == expected


# The distribution --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return small_pair()


@pytest.mark.parametrize(
    ("rule", "samples"),
    [("block", 20_000), *(pytest.param(r, 50_000, marks=pytest.mark.slow) for r in RULES)],
)
def test_three_tokens_follow_the_target(small, rule, samples):
    wrong, rate = sampled(small, samples=samples, budget=1, accept=rule, **HOT["top-p"])
    assert wrong < 4
    assert 0.1 < rate < 1


@pytest.mark.parametrize("rule", ["block", pytest.param("rejection", marks=pytest.mark.slow)])
def test_a_length_that_looks_at_the_drawn_token_is_noticed(small, monkeypatch, rule):
    """Drafts that are their logits' best are thought to be sure ones."""
    last = []
    propose = BlockDrafter.propose

    def watched(self, anchors, **how):
        last[:] = [propose(self, anchors, **how)]
        return last[0]

    def looks(logits):
        return torch.where(logits.argmax(dim=2) == last[0], 9.0, 0.0)

    monkeypatch.setattr(BlockDrafter, "propose", watched)
    monkeypatch.setattr(verify_lengths, "margins", looks)
    assert sampled(small, samples=15_000, budget=1, accept=rule, **HOT["top-p"])[0] > 6


def after_rejection(p, q, draft):
    """The distribution of a token for which this draft was verified, and that of its acceptance."""
    rate = (p / q).clamp(max=1)[draft]
    left = (p - q).clamp(min=0)
    found = (1 - rate) * left / left.sum().clamp(min=1e-12)
    found[draft] += rate
    return found, rate


def committed(p1, q1, p2, q2, drafts, length):
    """The distribution of a sequence's next two tokens, given its drafts; p2, q2 after each first.

    Token rejection.
    """
    first, second = p1.clone(), p2.clone()
    if length:
        one, two = drafts
        first, rate = after_rejection(p1, q1, one)
        if length > 1:
            reached = rate / first[one]
            second[one] = reached * after_rejection(p2[one], q2[one], two)[0]
            second[one] += (1 - reached) * p2[one]
    return (first.unsqueeze(1) * second).flatten()


def test_sequences_stay_independent_of_each_other():
    """Two sequences share a budget, so that one's drafts decide about the other's length.

    All of two tokens each, enumerated: the product of what the target gives each of them.
    """
    weights = torch.tensor([-0.3, 1.5]).repeat(2, 2, 1)
    batch = lengths.Sequences(torch.arange(2), torch.zeros(2, dtype=torch.long), spare=2)
    seen, wrong = set(), 0.0
    for seed in range(8):
        draw = torch.Generator().manual_seed(seed)
        p1, q1 = (torch.randn(2, 2, generator=draw).double().softmax(-1) for _ in range(2))
        p2, q2 = (torch.randn(2, 2, 2, generator=draw).double().softmax(-1) for _ in range(2))
        each = [(p1[row], q1[row], p2[row], q2[row]) for row in (0, 1)]
        target = torch.outer(*((p1[row].unsqueeze(1) * p2[row]).flatten() for row in (0, 1)))
        found, looked = torch.zeros(2, 4, 4, dtype=torch.float64)
        for tokens in itertools.product((0, 1), repeat=4):
            drafts = torch.tensor(tokens).view(2, 2)
            chances = torch.stack([torch.stack((q1[r], q2[r, drafts[r, 0]])) for r in (0, 1)])
            chance = chances.gather(2, drafts.unsqueeze(2)).prod()
            sure = (chances[..., 0] / chances[..., 1]).log().abs().float()
            drawn = torch.where(chances.argmax(dim=2) == drafts, 4.0, 0.0)
            for margins, total in ((sure, found), (drawn, looked)):
                verified = lengths.lengths_reference(margins, weights, batch, 1).verified.tolist()
                laws = [committed(*each[r], tokens[2 * r : 2 * r + 2], verified[r]) for r in (0, 1)]
                total += chance * torch.outer(*laws)
                if total is found:
                    seen.add((seed, *verified))
        torch.testing.assert_close(found, target)
        wrong = max(wrong, float((looked - target).abs().max()))
    assert len(seen) > 8, "lengths must follow the drafts for the test to see"
    assert wrong > 0.01, "a length that looks at the drawn token would be noticed"


# The choice --------------------------------------------------------------------------------------

COSTS = Costs(
    {4: {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6, 5: 2.0, 7: 2.4}},
    budgets={4: {1: 1.25, 2: 1.45, 3: 1.65, 5: 2.05}},
)
BATCH = Batch(4, ragged=True)


def learnt(promised, accepted):
    """A policy that has seen chains accept 1.4 drafts of 7, and budgets what is told."""
    policy = DepthPolicy(COSTS, 7)
    for cycle in range(200):
        policy.record((0, 1, 1, 2, 3)[cycle % 5], 7, sampled=False)
        policy.record_lengths(BATCH, promised, 2, accepted)
    return policy


def test_a_budget_is_chosen_where_it_commits_more_tokens_a_second():
    promised = [0.9, 1.35, 1.38, 1.39, 1.4, 1.4, 1.4]
    choices = [learnt(promised, 1.35).choose(BATCH) for _ in range(8)]
    assert set(choices) == {Drafts(5, budget=2)}
    assert learnt(promised, 1.35).choose(replace(BATCH, ragged=False)).budget == 0


def testpromises_that_are_not_kept_are_not_believed():
    assert learnt([0.9, 1.35, 1.38, 1.39, 1.4, 1.4, 1.4], 0.6).choose(BATCH).budget == 0


def test_chains_and_plain_steps_are_tried_again():
    policy = learnt([0.9, 1.35, 1.38, 1.39, 1.4, 1.4, 1.4], 1.35)
    choices = []
    for _ in range(600):
        choices.append(policy.choose(BATCH))
        policy.observe(BATCH, choices[-1], 1.5)
    assert Drafts(0) in choices
    assert any(each.is_chain and each.depth for each in choices)


@pytest.mark.parametrize(
    ("chains", "budgets"),
    [((1.0, 1.1, 1.2, 1.3, 1.5, 1.7), (1.2, 1.3, 1.4, 1.6)),
     ((1.0, 1.9, 2.8, 3.7, 5.5, 7.3), (1.1, 1.2, 1.3, 1.5))],
    ids=["chains", "budgets"],
)  # fmt: skip
def test_easy_requests_after_hard_ones_get_more_drafts(chains, budgets):
    """Whatever was learnt of hard ones: all else is tried again."""
    depths, sizes = (0, 1, 2, 3, 5, 7), (1, 2, 3, 5)
    costs = dict(zip(depths, chains, strict=True)), dict(zip(sizes, budgets, strict=True))
    policy = DepthPolicy(Costs({4: costs[0]}, budgets={4: costs[1]}), 7)
    draw, pace = random.Random(3), []
    for cycle in range(4000):
        chance = 0.2 if cycle < 1500 else 0.95
        drafts = policy.choose(BATCH)
        tokens = 4.0
        if drafts.budget:  # as sure of all: as many of each sequence
            promised = [sum(chance ** (i + 1) for i in range(min(b, drafts.depth)))
                        for b in range(1, drafts.depth + 1)]  # fmt: skip
            tokens += 4 * promised[drafts.budget - 1]
            policy.record_lengths(BATCH, promised, drafts.budget, promised[drafts.budget - 1])
        for _ in range(0 if drafts.budget else 4):
            accepted = 0
            while accepted < drafts.depth and draw.random() < chance:
                accepted += 1
            tokens += accepted
            policy.record(accepted, drafts.depth, sampled=False)
        seconds = costs[1][drafts.budget] if drafts.budget else costs[0][drafts.depth]
        policy.observe(BATCH, drafts, seconds)
        pace.append(tokens / seconds)
    best = max(
        *((1 + sum(0.95 ** (i + 1) for i in range(d))) / s for d, s in costs[0].items()),
        *((1 + sum(0.95 ** (i + 1) for i in range(b))) / s for b, s in costs[1].items()),
    )
    assert sum(pace[-1000:]) / 4000 > 0.93 * best


def test_an_engine_learns_to_choose():
    """Costs by which one of seven drafts is worth verifying: budgets are chosen, texts stay."""
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter)
    costs = {0: 1.0, 1: 1.9, 2: 2.8, 3: 3.7, 5: 5.5, 7: 7.3}
    engine.policy = DepthPolicy(Costs({4: costs}, budgets={4: {1: 1.01}}), engine.depth)
    common = {"max_new_tokens": 30, "temperature": 0.8, "accept": "coupled"}
    seeds = [5, 6, 7, 8]
    found, counts, _ = run_engine(engine, PROMPTS, seeds=seeds, **common)
    assert found == run_reference(target, None, PROMPTS, seed=5, **common)[0]
    assert sum(counts.offered) > 0
    assert engine.policy.promises
