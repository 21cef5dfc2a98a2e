"""The real model: greedy output equals plain decoding's, token for token."""

import pytest

from domino_spec import DominoDecoder
from domino_spec.demo import untrained_drafter
from domino_spec.drafters import BlockDrafter
from tests.smollm2.prompts import PROMPTS
from tests.support.drafters import Adversarial, Oracle
from tests.support.runs import run

DEPTH = 15


def test_oracle_drafts(quantized, short_prompts, short_answers):
    proposer = Oracle(short_answers, depth=DEPTH, vocab=quantized.target.vocab_size)
    found, stats = run(quantized.target, proposer, short_prompts, max_new_tokens=20)
    assert found == short_answers
    assert stats.tokens_per_cycle == pytest.approx(19 / 2)


def test_adversarial_drafts(quantized, short_prompts, short_answers):
    proposer = Adversarial(short_answers, depth=DEPTH, vocab=quantized.target.vocab_size)
    found, stats = run(quantized.target, proposer, short_prompts, max_new_tokens=12)
    assert found == [answer[:12] for answer in short_answers]
    assert 1 < stats.tokens_per_cycle < 6


@pytest.mark.slow
def test_random_drafter_over_real_hidden_states(quantized, short_prompts, short_answers):
    drafter = untrained_drafter(quantized.target)
    proposer = BlockDrafter(drafter).with_depth(DEPTH)
    found, _ = run(quantized.target, proposer, short_prompts, max_new_tokens=12)
    assert found == [answer[:12] for answer in short_answers]


def test_the_real_chat_template_and_end_of_sequence(quantized, short_prompts, short_answers):
    drafter = untrained_drafter(quantized.target)
    target, tokenizer = quantized.target, quantized.tokenizer
    decoder = DominoDecoder(target, drafter, tokenizer, engine="fast", depth=DEPTH)
    chat = [{"role": "user", "content": PROMPTS[0]}]
    result = decoder.generate(chat, max_new_tokens=8)
    assert result.prompt_tokens == short_prompts[0]
    assert result.tokens == short_answers[0][:8]
    assert "Lisbon" in result.text
    assert decoder.eos_token_ids == {2}
