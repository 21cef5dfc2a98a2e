"""Ends are exact: inside a block, on the token, never a cycle late."""

import pytest

from tests.support.drafters import Good, Oracle
from tests.support.families import MASK, VOCAB, make_target, plain_greedy, random_prompts
from tests.support.runs import run

DEPTH = 7


@pytest.fixture(scope="module")
def case():
    target = make_target("llama")
    prompts = random_prompts((5, 9, 3))
    return target, prompts, [plain_greedy(target.model, prompt, 60) for prompt in prompts]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17, 60])
@pytest.mark.parametrize("kind", [Oracle, Good])
def test_max_new_tokens_is_exact(case, count, kind):
    target, prompts, answers = case
    proposer = kind(answers, depth=DEPTH, vocab=VOCAB)
    found, _ = run(target, proposer, prompts, max_new_tokens=count)
    assert found == [answer[:count] for answer in answers]


def test_no_more_is_drafted_than_may_still_be_generated(case, monkeypatch):
    target, prompts, answers = case
    widths = []
    forward = type(target).forward

    def counted(self, tokens, *args, **options):
        widths.append(tokens.shape[1])
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(type(target), "forward", counted)
    run(target, Oracle(answers, depth=DEPTH, vocab=VOCAB), prompts, max_new_tokens=12)
    assert widths[1:] == [8, 3]  # the prefill gives one token, the cycles 8 and 3


@pytest.mark.parametrize("place", [0, 1, 4, 8, 9, 20])
def test_eos_inside_a_block_ends_the_row_there(case, place):
    target, prompts, answers = case
    eos = answers[0][place]
    expected = []
    for answer in answers:
        end = answer.index(eos) + 1 if eos in answer else 60
        expected.append(answer[:end])
    for proposer in (Oracle(answers, depth=DEPTH, vocab=VOCAB), None):
        found, _ = run(target, proposer, prompts, max_new_tokens=60, eos={eos})
        assert found == expected
        assert len(found[0]) == answers[0].index(eos) + 1


def test_tokens_equal_to_the_mask_id_survive():
    """A target that does say the mask token is not robbed of it."""
    target = make_target("llama")
    weight = target.lm_head.weight
    saved = weight[MASK].detach().clone()
    try:
        prompts = random_prompts((5, 8))
        weight.data[MASK] = 3 * weight.data[10]
        answers = [plain_greedy(target.model, prompt, 40) for prompt in prompts]
        assert any(MASK in answer for answer in answers), "the case does not arise"
        found, _ = run(target, Good(answers, depth=DEPTH, vocab=VOCAB), prompts, max_new_tokens=40)
        assert found == answers
    finally:
        weight.data[MASK] = saved


def test_drafts_after_an_end_count_as_neither_offered_nor_rejected(case):
    target, prompts, answers = case
    eos = answers[0][4]
    assert eos not in answers[0][:4]
    proposer = Oracle(answers[:1], depth=DEPTH, vocab=VOCAB)
    _, stats = run(target, proposer, prompts[:1], max_new_tokens=60, eos={eos})
    assert stats.acceptance.accepted == stats.acceptance.offered == [1, 1, 1, 1]
    _, stats = run(target, proposer, prompts[:1], max_new_tokens=6)
    assert stats.acceptance.accepted == stats.acceptance.offered == [1, 1, 1, 1]


def test_rows_that_end_early_leave_the_others_alone(case):
    target, prompts, answers = case
    eos = answers[1][2]
    found, stats = run(
        target, Good(answers, depth=DEPTH, vocab=VOCAB), prompts, max_new_tokens=60, eos={eos}
    )
    for row, answer in zip(found, answers, strict=True):
        end = answer.index(eos) + 1 if eos in answer else 60
        assert row == answer[:end]
    assert stats.acceptance.committed == sum(len(row) - 1 for row in found)
