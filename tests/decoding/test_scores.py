"""Scores are the target's own log-probabilities, whatever is done to its logits afterwards."""

import pytest
import torch
import transformers as tf

from domino_spec.decoding import SamplingParams, decode
from tests.support.drafters import Good
from tests.support.families import make_target, random_prompts
from tests.support.runs import make_sequences

PROMPTS = random_prompts([4, 9])


class Meddler(tf.LogitsProcessor):
    """Writes into what it is given."""

    def __call__(self, _ids, scores):
        return scores.mul_(3.0)


def outputs_of(proposer, target, **changes):
    params = SamplingParams(max_new_tokens=12, **changes)
    sequences = make_sequences(PROMPTS, params)
    return sequences, list(decode(target, proposer, sequences))


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("changes", [
    {}, {"temperature": 1.7, "top_k": 3, "seed": 1, "accept": "coupled"},
    {"repetition_penalty": 2.0},
    {"processors": (Meddler(),), "temperature": 1.0, "seed": 2, "accept": "coupled"},
], ids=["greedy", "sampled", "penalty", "in place"])  # fmt: skip
def test_scores_are_the_models_own(changes, drafts):
    target = make_target("llama")
    sequences, outputs = outputs_of(None, target, logprobs=3, **changes)
    if drafts:
        answers = [sequence.output for sequence in sequences]
        proposer = Good(answers, depth=7, vocab=target.vocab_size)
        sequences, outputs = outputs_of(proposer, target, logprobs=3, **changes)
        assert any(each.accepted > 1 for each in outputs)
    for sequence in sequences:
        with torch.no_grad():
            logits = target.model(torch.tensor([sequence.prompt + sequence.output])).logits[0]
        expected = logits.float().log_softmax(-1)[len(sequence.prompt) - 1 : -1]
        scores = [s for each in outputs if each.sequence is sequence for s in each.scores]
        assert len(scores) == len(sequence.output) == 12
        for score, token, place in zip(scores, sequence.output, expected, strict=True):
            assert score.logprob == pytest.approx(float(place[token]), abs=1e-4)
            values, ids = place.topk(3)
            assert [token for token, _ in score.top] == ids.tolist()
            assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_each_output_has_as_many_scores_as_tokens():
    target = make_target("llama")
    sequences, _ = outputs_of(None, target)
    proposer = Good([sequence.output for sequence in sequences], depth=7, vocab=target.vocab_size)
    _, outputs = outputs_of(proposer, target, logprobs=0)
    assert any(len(each.tokens) > 2 for each in outputs)
    assert all(len(each.scores) == len(each.tokens) for each in outputs)
    assert all(score.top == () for each in outputs for score in each.scores)


def test_who_does_not_ask_gets_none():
    _, outputs = outputs_of(None, make_target("llama"))
    assert {each.scores for each in outputs} == {None}


def test_a_prompts_scores_are_the_models_own(monkeypatch):
    monkeypatch.setattr("domino_spec.decoding.loop._SCORED_AT_ONCE", 4)
    target = make_target("llama")
    sequences, _ = outputs_of(None, target, prompt_logprobs=3, temperature=2.0, top_k=1)
    for sequence in sequences:
        with torch.no_grad():
            logits = target.model(torch.tensor([sequence.prompt])).logits[0]
        expected = logits.float().log_softmax(-1)
        first, *scores = sequence.prompt_scores
        assert first is None
        for score, token, place in zip(scores, sequence.prompt[1:], expected[:-1], strict=True):
            assert score.logprob == pytest.approx(float(place[token]), abs=1e-4)
            assert [each for each, _ in score.top] == place.topk(3).indices.tolist()
            assert score.rank == int(place.argsort(descending=True).tolist().index(token)) + 1
