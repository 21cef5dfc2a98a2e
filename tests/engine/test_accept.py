"""Accept rules on the engine: the reference loop's tokens, and the target's distribution."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.drafter import DraftModel
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.engine import accept as rules
from domino_spec.engine import attention, sampling
from domino_spec.engine.model_runner import Plan, PromptChunk
from domino_spec.engine.sampling import RULES, DraftLogits, Draws
from tests.engine.runs import make_engine, run_engine, run_reference
from tests.golden.pairs import KINDS, model_of, target_of
from tests.golden.pairs import prompts as few_tokens
from tests.support.distribution import deviations, enumerated
from tests.support.families import (
    drafter_config,
    make_target,
    random_drafter,
    random_prompts,
    randomise,
)
from tests.support.small import VOCAB, small_pair

DRAWN = ("rejection", "block")
PROMPTS = random_prompts([3, 9, 5])
FEW_TOKENS = few_tokens()
NEW = 14
PARAMS = (
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
)


def both(target, drafter, *, candidates=None, prompts=PROMPTS, **params):
    """Texts of the reference loop and of the engine.

    Towards a text's end the reference loop drafts less, and other drafts are other draws.
    """
    longer = {"max_new_tokens": NEW + 16, **params}
    expected, counts, _ = run_reference(
        target, drafter, prompts, candidates=candidates, seed=11, **longer
    )
    engine = make_engine(target, drafter, candidates=candidates)
    seeds = [11 + row for row in range(len(prompts))]
    found, _, _ = run_engine(engine, prompts, seeds=seeds, **longer)
    assert sum(counts.accepted) > 0 or params.get("accept") == "match"
    return [text[:NEW] for text in expected], [text[:NEW] for text in found]


@pytest.mark.parametrize(
    ("rule", "params", "candidates"),
    [
        pytest.param(rule, PARAMS[each], few, marks=() if often else pytest.mark.slow)
        for rule, each, few, often in (
            ("match", 0, None, True), ("match", 1, 8, False), ("rejection", 1, 8, True),
            ("rejection", 2, None, False), ("rejection", 0, None, False), ("block", 0, 8, False),
            ("block", 1, None, True), ("block", 2, 8, True),
        )
    ],
)  # fmt: skip
def test_tokens_and_drafts_are_the_reference_loops(rule, params, candidates):
    target, drafter = make_target("qwen3"), random_drafter(drafter_config(draft_vocab_size=40))
    expected, found = both(target, drafter, candidates=candidates, accept=rule, **params)
    assert found == expected


@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.slow), "block"])
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("dflash", "markov"))) for kind in KINDS
])  # fmt: skip
def test_every_kind_of_drafter_draws_its_drafts(rule, kind):
    target, prompts = target_of("llama"), FEW_TOKENS
    drafter = LookupDrafter(depth=3) if kind == "lookup" else drafter_of(model_of(kind))
    expected, found = both(target, drafter, prompts=prompts, accept=rule, temperature=0.7)
    assert found == expected
    if kind == "lookup":  # certain drafts: what the target draws decides, and a seed keeps its text
        plain, _ = both(target, drafter, prompts=prompts, temperature=0.7)
        assert found == plain


def test_sequences_of_all_rules_share_a_batch():
    target = make_target("llama")
    each = [SamplingParams(max_new_tokens=NEW)]
    each += [SamplingParams(max_new_tokens=NEW, temperature=0.9, accept=rule) for rule in RULES]
    prompts, seeds = [PROMPTS[1]] * 5, [9] * 5
    together = run_engine(make_engine(target, random_drafter()), prompts, seeds=seeds, params=each)
    for own, answer in zip(each, together[0], strict=True):
        engine = make_engine(target, random_drafter(), slots=1)
        assert run_engine(engine, prompts[:1], seeds=[9], params=[own])[0] == [answer]


# The distribution --------------------------------------------------------------------------------

PROMPT = [3, 7, 1]
SAMPLES, ROWS = 50_000, 2500
HOT = {
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "penalty": {
        "temperature": 1.0,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.6,
        "logit_bias": {2: 1.5, 4: -2.0, 5: -100},
    },
}


def sampled(pair, *, samples=SAMPLES, tree=0, budget=0, **params) -> tuple[float, float]:
    """Deviations of many samples' three tokens, and the drafts accepted in a cycle.

    The engine's runner alone: sequences of the host would take most of the time.
    """
    target, drafter = pair
    few = params.pop("m", None)
    engine = make_engine(target, drafter, slots=ROWS, capacity=24, candidates=few, tree=tree)
    runner, own = engine.runner, SamplingParams(max_new_tokens=4, **params)
    slots, first = list(range(ROWS)), Plan.of([own], 0, alone=False)
    plan = replace(Plan.of([own], engine.depth, engine.nodes, alone=False), budget=budget)
    found, accepted = Counter(), []
    for lot in range(samples // ROWS):
        seeds = [lot * ROWS + slot for slot in slots]
        states = runner.prefill([PromptChunk(slot, 0, PROMPT) for slot in slots], drafts=True)
        runner.start_sequences(
            states, slots, first, prompts=[PROMPT] * ROWS, params=[own] * ROWS, seeds=seeds,
            ends=[()] * ROWS,
        )  # fmt: skip
        texts = torch.zeros(ROWS, 3 * plan.depth + 4, dtype=torch.long)
        lengths = torch.zeros(ROWS, dtype=torch.long)
        for _ in range(3):
            report = runner.start_cycle(slots, plan)()
            accepted.append(report[:, 0].float().mean())
            for place in range(plan.depth + 1):  # what is too many is written over
                texts.scatter_(1, (lengths + place).unsqueeze(1), report[:, place + 1 : place + 2])
            lengths += report[:, 0] + 1
        found.update(map(tuple, texts[:, :3].tolist()))
    return deviations(found, enumerated(target, own, PROMPT, 4)), float(
        torch.stack(accepted).mean()
    )


@pytest.fixture(scope="module")
def small():
    return small_pair()


@pytest.mark.parametrize(
    ("rule", "samples"),
    [("block", 20_000), *(pytest.param(r, SAMPLES, marks=pytest.mark.slow) for r in RULES)],
)
def test_three_tokens_follow_the_target(small, rule, samples):
    wrong, rate = sampled(small, samples=samples, accept=rule, **HOT["top-p"])
    assert wrong < 4
    assert 0.1 < rate < 2, "drafts must be both accepted and rejected for the test to see"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "match"])
def test_three_tokens_follow_the_target_with_trees(small, rule, monkeypatch):
    """And do not, if a node sees more than its own branch."""
    wrong, rate = sampled(small, accept=rule, tree=5, **HOT["top-p"])
    assert wrong < 4
    assert 0.1 < rate < 2
    monkeypatch.setattr(attention, "ancestor_mask", sees_all_before)
    assert sampled(small, accept=rule, tree=5, **HOT["top-p"])[0] > 8


def sees_all_before(bits):
    """Without the ancestor mask: all nodes up to its own."""
    return torch.ones(*bits.shape, bits.shape[1], dtype=torch.bool).tril()


@pytest.mark.slow
@pytest.mark.parametrize("rule", DRAWN)
def test_with_penalties_and_biases_too(small, rule):
    assert sampled(small, accept=rule, **HOT["penalty"])[0] < 4


@pytest.mark.parametrize("rule", ["block", pytest.param("rejection", marks=pytest.mark.slow)])
def test_tokens_that_no_draft_can_be_come_as_often_as_the_target_wants(small, rule):
    """A few candidates of a reduced vocabulary."""
    target, drafter = small
    config = replace(drafter.config, draft_vocab_size=5)
    few = randomise(DraftModel(config, torch.tensor([7, 2, 9, 0, 4])).eval(), 0.4, seed=6)
    assert sampled((target, few), samples=20_000, accept=rule, m=3, **HOT["top-p"])[0] < 4


def exits_early(success):
    return success.long().cumprod(dim=1).sum(dim=1)


def one_stream(seeds, _starts, _salt):
    return seeds


@pytest.mark.parametrize(("rule", "name", "broken"), [
    ("block", "_last", exits_early), ("block", "salted", one_stream),
    pytest.param("rejection", "salted", one_stream, marks=pytest.mark.slow),
])  # fmt: skip
def test_what_others_got_wrong_is_noticed(small, monkeypatch, rule, name, broken):
    for module in (rules, sampling):
        monkeypatch.setattr(module, name, broken, raising=False)
    assert sampled(small, samples=15_000, accept=rule, **HOT["top-p"])[0] > 6


def test_block_verification_accepts_more_of_the_papers_example():
    """Two tokens and two drafts: 11/9 of them against 10/9."""
    rows = 20_000
    p, q = torch.tensor([1 / 3, 2 / 3]).log(), torch.tensor([2 / 3, 1 / 3]).log()
    starts = torch.zeros(rows, dtype=torch.long)
    for rule, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        draws = Draws(
            temperature=torch.ones(rows),
            seeds=torch.arange(rows),
            rules=torch.full((rows,), RULES.index(rule)),
        )
        kept = [DraftLogits(q.expand(rows, 2, -1), None)]
        drafts = draws.for_drafts(starts).choose(q.expand(rows, 2, -1), starts)
        block = torch.cat((starts.unsqueeze(1), drafts), dim=1)
        chosen, accepted = rules.accept(
            p.expand(rows, 3, -1), block, draws, starts, kept, mixed=False
        )
        assert float(accepted.float().mean()) == pytest.approx(expected, abs=0.03)
        ones = [chosen[accepted >= place, place].float().mean() for place in range(3)]
        assert ones[0] == pytest.approx(2 / 3, abs=0.02)


def test_a_block_ends_where_the_draws_agree_with_the_reference():
    """Random distributions of every length, zeros among them, one row as many.

    A sequence that verifies fewer drafts than others is one whose block is shorter.
    """
    draw = torch.Generator().manual_seed(0)
    for depth, seed, lengths in itertools.product((1, 2, 5), range(3), (None, [0, 1, 3, 5])):
        ends = None if lengths is None else torch.tensor(lengths).clamp(max=depth)
        p = torch.randn(4, depth + 1, VOCAB, generator=draw) * 2
        q = torch.randn(4, depth, VOCAB, generator=draw)
        p[:, :, seed] = -torch.inf
        draws = Draws(
            temperature=torch.full((4,), 0.7),
            seeds=torch.arange(4) + seed,
            rules=torch.full((4,), RULES.index("block")),
        )
        starts = torch.arange(4) * 3
        block = torch.randint(VOCAB, (4, depth + 1), generator=draw)
        kept = [DraftLogits(q, None)]
        together = rules.accept(p, block, draws, starts, kept, mixed=False, lengths=ends)
        for row in range(4):
            one, end = slice(row, row + 1), depth if ends is None else int(ends[row])
            if not end:
                assert int(together[1][row]) == 0
                continue
            own = Draws(**{
                name: value[one] for name, value in vars(draws).items() if torch.is_tensor(value)
            })  # fmt: skip
            kept = [DraftLogits(q[one, :1], None), DraftLogits(q[one, 1:end], None)]
            short = (p[one, : end + 1], block[one, : end + 1], own, starts[one])
            alone = rules.accept(*short, kept, mixed=False)
            assert int(alone[1]) == int(together[1][row])
            kept_tokens = slice(0, int(alone[1]) + 1)
            assert torch.equal(alone[0][0, kept_tokens], together[0][row, kept_tokens])
