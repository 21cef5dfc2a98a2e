"""Presence and frequency penalties: over generated tokens only, in their place of the chain."""

import pytest
import torch
import transformers as tf

from domino_spec.decoding import SamplingParams, decode
from domino_spec.decoding.processors import GeneratedPenalty
from tests.support.drafters import Good
from tests.support.families import make_target, random_prompts
from tests.support.runs import make_sequences

PROMPTS = random_prompts([4, 9])


def test_each_time_costs_the_frequency_and_having_come_the_presence():
    penalty = GeneratedPenalty(presence=0.5, frequency=0.25, prompt_length=2)
    ids = torch.tensor([[1, 1, 3, 4, 3, 3]])
    found = penalty(ids, torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0]]))
    assert found.tolist() == [[1.0, 1.0, 1.0, 1.0 - 3 * 0.25 - 0.5, -1.0 - 0.25 - 0.5]]


def test_the_prompt_costs_nothing():
    scores = torch.randn(1, 6)
    penalty = GeneratedPenalty(presence=1.0, frequency=1.0, prompt_length=3)
    assert torch.equal(penalty(torch.tensor([[1, 2, 3]]), scores), scores)


def test_the_order_of_the_chain():
    own = tf.SuppressTokensLogitsProcessor([5])
    params = SamplingParams(
        temperature=0.5, repetition_penalty=1.2, presence_penalty=0.1, processors=(own,)
    )
    assert [type(part) for part in params.all_processors(3)] == [
        tf.RepetitionPenaltyLogitsProcessor, GeneratedPenalty, type(own),
        tf.TemperatureLogitsWarper,
    ]  # fmt: skip
    assert not SamplingParams().all_processors(3)
    assert not SamplingParams().penalises


def plainly(target, prompt, params):
    """Token by token with the model itself: a penalty by a dictionary of counts."""
    ids, counts = list(prompt), {}
    for _ in range(params.max_new_tokens):
        with torch.no_grad():
            scores = target.model(torch.tensor([ids])).logits[0, -1]
        for token, count in counts.items():
            scores[token] -= params.frequency_penalty * count + params.presence_penalty
        ids.append(int(scores.argmax()))
        counts[ids[-1]] = counts.get(ids[-1], 0) + 1
    return ids[len(prompt) :]


@pytest.mark.parametrize("changes", [
    {"presence_penalty": 1.5}, {"frequency_penalty": 0.9},
    {"presence_penalty": -0.5, "frequency_penalty": -1.5},
], ids=str)  # fmt: skip
def test_rows_of_different_prompts_pay_for_their_own_answers(changes):
    target = make_target("llama")
    params = SamplingParams(max_new_tokens=20, **changes)
    expected = [plainly(target, prompt, params) for prompt in PROMPTS]
    free = SamplingParams(max_new_tokens=20)
    assert expected != [plainly(target, prompt, free) for prompt in PROMPTS]
    for proposer in (None, Good(expected, depth=7, vocab=target.vocab_size)):
        sequences = make_sequences(PROMPTS, params)
        outputs = list(decode(target, proposer, sequences))
        assert [sequence.output for sequence in sequences] == expected
    assert max(output.accepted for output in outputs) > 2
