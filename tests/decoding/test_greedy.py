"""Greedy output is plain decoding's, token for token, whatever the drafter proposes."""

import dataclasses
from functools import cache

import pytest
import torch

from domino_spec.drafter import DraftModel
from domino_spec.drafters import BlockDrafter
from domino_spec.engine.models import families
from domino_spec.targets import Target, probe_target
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.families import (
    CONFIGS,
    VOCAB,
    drafter_config,
    make_model,
    make_target,
    plain_greedy,
    random_drafter,
    random_prompts,
)
from tests.support.pair import bigram_target, knowing_drafter, knowing_markov_drafter
from tests.support.runs import run

LENGTHS = (5, 9, 1, 14)
NEW = 17  # not a multiple of a block, so that the last block is cut
DEPTH = 7
KINDS = ("oracle", "good", "adversarial", "random", "dflash", "plain")
# Every kind of drafts and one row alone where layers slide; for the others the hardest ones.
CASES = [("gemma3_text", kind, rows) for kind in KINDS for rows in (1, len(LENGTHS))]
CASES += [(family, "adversarial", len(LENGTHS)) for family in CONFIGS if family != "gemma3_text"]
# The engine's families decode with a real drafter in its tests too, against this loop.
CASES += [
    pytest.param(
        family, "random", len(LENGTHS), marks=pytest.mark.slow if family in families() else ()
    )
    for family in CONFIGS
    if family != "gemma3_text"
]


@cache
def case(family):
    target = make_target(family)
    prompts = random_prompts(LENGTHS)
    return target, prompts, [plain_greedy(target.model, prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize(("family", "kind", "rows"), CASES)
def test_equal_to_plain_decoding(family, kind, rows):
    target, prompts, answers = case(family)
    scripted = {"oracle": Oracle, "good": Good, "adversarial": Adversarial}
    if kind in scripted:
        proposer = scripted[kind](answers, depth=DEPTH, vocab=VOCAB)
    elif kind == "plain":
        proposer = None
    else:
        config = drafter_config(shift=kind == "random", head=kind == "random")
        proposer = BlockDrafter(random_drafter(config)).with_depth(DEPTH)
    found, stats = run(target, proposer, prompts[:rows], max_new_tokens=NEW)
    assert found == answers[:rows]
    if kind == "oracle":
        assert stats.tokens_per_cycle == pytest.approx((NEW - 1) / 2)  # 8 + 8
        assert stats.acceptance.acceptance_by_position == [1.0] * DEPTH
    if kind == "good":
        assert 1.5 < stats.tokens_per_cycle < 6
    if kind == "plain":
        assert stats.tokens_per_cycle == 1.0
        assert stats.acceptance.offered == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_give_the_same_tokens(attention):
    target = Target(make_model("gemma3_text", attention=attention))
    probe_target(target)
    prompts = random_prompts(LENGTHS)
    answers = [plain_greedy(target.model, prompt, NEW) for prompt in prompts]
    found, _ = run(target, Good(answers, depth=DEPTH, vocab=VOCAB), prompts, max_new_tokens=NEW)
    assert found == answers


KNOWING = {
    "shift, one pure draft": lambda: knowing_drafter(shift=True, prefix=1),
    "shift": lambda: knowing_drafter(shift=True, prefix=0),
    "no-shift": lambda: knowing_drafter(shift=False, prefix=0),
    "markov, shift": lambda: knowing_markov_drafter(shift=True),
    "markov, no-shift": lambda: knowing_markov_drafter(shift=False),
}


@pytest.mark.parametrize("kind", KNOWING)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_drafter_that_knows_the_target_is_always_accepted(kind, rows):
    target, drafter = bigram_target(), KNOWING[kind]()
    prompts = [[4, 9], [20], [1, 2, 3, 4, 5]][:rows]
    answers = [plain_greedy(target.model, prompt, 50) for prompt in prompts]
    proposer = BlockDrafter(drafter).with_depth(drafter.config.default_depth)
    found, stats = run(target, proposer, prompts, max_new_tokens=50)
    assert found == answers
    assert stats.acceptance.accepted == stats.acceptance.offered
    assert sum(stats.acceptance.accepted) >= 42 * rows


def test_the_wrong_alignment_is_exact_but_useless():
    target, right = bigram_target(), knowing_drafter(shift=True, prefix=1)
    wrong = DraftModel(dataclasses.replace(right.config, shift_label=False))
    wrong.load_state_dict(right.state_dict())
    answers = [plain_greedy(target.model, [4, 9], 50)]
    found, stats = run(target, BlockDrafter(wrong).with_depth(7), [[4, 9]], max_new_tokens=50)
    assert found == answers
    # A mask slot names one fixed token, right once in a cycle of 39 tokens.
    assert stats.acceptance.accepted[0] <= 2
    assert stats.acceptance.offered[0] > 35


def test_all_drafts_of_a_shifted_block_can_be_verified():
    target, drafter = bigram_target(), knowing_drafter(shift=True, prefix=1)
    proposer = BlockDrafter(drafter).with_depth(drafter.config.max_depth)
    found, stats = run(target, proposer, [[4, 9]], max_new_tokens=46)
    assert found == [plain_greedy(target.model, [4, 9], 46)]
    assert stats.tokens_per_cycle == 9.0


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_shallower_verification(depth):
    target, prompts, answers = case("llama")
    proposer = Good(answers, depth=depth, vocab=VOCAB)
    assert run(target, proposer, prompts[:3], max_new_tokens=NEW)[0] == answers[:3]


def test_candidates_and_reduced_vocabulary_stay_exact():
    target, prompts, answers = case("llama")
    reduced = random_drafter(drafter_config(draft_vocab_size=20))
    reduced.draft_tokens = torch.arange(10, 30)
    for drafter, candidates in ((random_drafter(), 8), (reduced, None), (reduced, 4)):
        proposer = BlockDrafter(drafter, candidates=candidates).with_depth(DEPTH)
        assert run(target, proposer, prompts, max_new_tokens=NEW)[0] == answers


def test_long_context_to_the_last_position():
    """Learned positions would fail on one index too many."""
    target = make_target("gpt2")
    prompts = random_prompts((236, 190))
    new = target.context_length - 236
    answers = [plain_greedy(target.model, prompt, new) for prompt in prompts]
    found, _ = run(target, Good(answers, depth=DEPTH, vocab=VOCAB), prompts, max_new_tokens=new)
    assert found == answers
