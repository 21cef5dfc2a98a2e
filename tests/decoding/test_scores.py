"""Scores are the target's own log-probabilities, whatever is done to its logits afterwards."""

import pytest
import torch
import transformers as tf

from domino_spec.decoding import NoDrafts, SamplingParams, decode
from tests.support.drafters import Good
from tests.support.families import make_target, random_prompts
from tests.support.runs import make_rows

PROMPTS = random_prompts([4, 9])


class Meddler(tf.LogitsProcessor):
    """Writes into what it is given."""

    def __call__(self, _ids, scores):
        return scores.mul_(3.0)


def commits_of(proposer, target, **changes):
    params = SamplingParams(max_new_tokens=12, **changes)
    rows = make_rows(target, PROMPTS, params)
    return rows, list(decode(target, proposer, rows))


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("changes", [
    {}, {"temperature": 1.7, "top_k": 3, "seed": 1, "accept": "coupled"},
    {"repetition_penalty": 2.0},
    {"processors": (Meddler(),), "temperature": 1.0, "seed": 2, "accept": "coupled"},
], ids=["greedy", "sampled", "penalty", "in place"])  # fmt: skip
def test_scores_are_the_models_own(changes, drafts):
    target = make_target("llama")
    rows, commits = commits_of(NoDrafts(), target, logprobs=3, **changes)
    if drafts:
        answers = [row.generated for row in rows]
        proposer = Good(answers, depth=7, vocab=target.vocab_size)
        rows, commits = commits_of(proposer, target, logprobs=3, **changes)
        assert any(commit.accepted > 1 for commit in commits)
    for row in rows:
        with torch.no_grad():
            logits = target.model(torch.tensor([row.prompt + row.generated])).logits[0]
        expected = logits.float().log_softmax(-1)[len(row.prompt) - 1 : -1]
        scores = [s for commit in commits if commit.row == row.index for s in commit.scores]
        assert len(scores) == len(row.generated) == 12
        for score, token, place in zip(scores, row.generated, expected, strict=True):
            assert score.logprob == pytest.approx(float(place[token]), abs=1e-4)
            values, ids = place.topk(3)
            assert [token for token, _ in score.top] == ids.tolist()
            assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_each_commit_has_as_many_scores_as_tokens():
    target = make_target("llama")
    rows, _ = commits_of(NoDrafts(), target)
    proposer = Good([row.generated for row in rows], depth=7, vocab=target.vocab_size)
    _, commits = commits_of(proposer, target, logprobs=0)
    assert any(len(commit.tokens) > 2 for commit in commits)
    assert all(len(commit.scores) == len(commit.tokens) for commit in commits)
    assert all(score.top == () for commit in commits for score in commit.scores)


def test_who_does_not_ask_gets_none():
    _, commits = commits_of(NoDrafts(), make_target("llama"))
    assert {commit.scores for commit in commits} == {None}
