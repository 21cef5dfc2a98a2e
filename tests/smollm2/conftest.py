"""SmolLM2-135M-Instruct in float32, loaded once, with plain decoding's answers as the truth."""

import pytest

from domino_spec.demo import smollm2
from domino_spec.targets import load_target
from tests.smollm2.prompts import PROMPTS
from tests.support.families import plain_greedy


@pytest.fixture(scope="session")
def loaded():
    return load_target(smollm2())


@pytest.fixture(scope="session")
def prompts(loaded):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [
        loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]


@pytest.fixture(scope="session")
def short_answers(loaded, prompts):
    """20 tokens for the first two prompts; the full matrix takes all of them."""
    return [plain_greedy(loaded.target.model, prompt, 20) for prompt in prompts[:2]]


@pytest.fixture(scope="session")
def answers(loaded, prompts):
    """128 greedy tokens of Transformers' own generate, one token a forward, a row at a time."""
    return [plain_greedy(loaded.target.model, prompt, 128) for prompt in prompts]
