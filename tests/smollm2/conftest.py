"""SmolLM2-135M-Instruct, loaded once a way, with plain decoding's answers as the truth."""

import pytest

from domino_spec.demo import smollm2
from domino_spec.targets import load_target
from tests.smollm2.prompts import PROMPTS
from tests.support.families import plain_greedy


@pytest.fixture(scope="session")
def quantized():
    """The file's own weights, as a CPU decodes it."""
    return load_target(smollm2(), quantize="keep", device="cpu")


@pytest.fixture(scope="session")
def loaded():
    """In float32, for the full matrix."""
    return load_target(smollm2())


@pytest.fixture(scope="session")
def short_prompts(quantized):
    return encoded(quantized, PROMPTS[:2])


@pytest.fixture(scope="session")
def short_answers(quantized, short_prompts):
    """20 tokens for the first two prompts; the full matrix takes all of them."""
    return [plain_greedy(quantized.target.model, prompt, 20) for prompt in short_prompts]


@pytest.fixture(scope="session")
def prompts(loaded):
    return encoded(loaded, PROMPTS)


def encoded(target, texts):
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]


@pytest.fixture(scope="session")
def answers(loaded, prompts):
    """128 greedy tokens of Transformers' own generate, one token a forward, a row at a time."""
    return [plain_greedy(loaded.target.model, prompt, 128) for prompt in prompts]
