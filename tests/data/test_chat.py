from __future__ import annotations

import copy

import numpy as np
import pytest

from domino_spec.data.chat import ChatEncoder
from domino_spec.data.files import BadRow
from domino_spec.errors import DataError
from tests.support.tokens import small_tokenizer

CHAT = [
    {"role": "system", "content": "a domino"},
    {"role": "user", "content": "the fox"},
    {"role": "assistant", "content": "jumps over"},
    {"role": "user", "content": "the dog"},
    {"role": "assistant", "content": "falls"},
]
# Like ChatML: the template adds a line break after the end of each turn.
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Thinking stands in the last turn only, as in several families of reasoning models.
FORGETFUL = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<|think|>{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|end|>"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_END = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_with(template: str):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def learnt_texts(template: str, messages=CHAT, **options) -> list[str]:
    """The texts of the runs of learnt tokens."""
    tokenizer = tokenizer_with(template)
    chat = ChatEncoder(tokenizer, options).encode(messages)
    runs: list[list[int]] = []
    for index, (token, learnt) in enumerate(zip(chat.tokens, chat.supervised, strict=True)):
        if learnt and (not index or not chat.supervised[index - 1]):
            runs.append([])
        if learnt:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_assistant_turn_with_its_end_and_nothing_else(template):
    assert learnt_texts(template) == ["jumps over<|end|>", "falls<|end|>"]


def test_the_exact_tokens_and_places():
    tokenizer = tokenizer_with(CHATML)
    chat = ChatEncoder(tokenizer).encode(CHAT)
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    before = ids("<|system|>a domino<|end|> <|user|>the fox<|end|> <|assistant|>")
    first = ids("jumps over<|end|>")
    between = ids(" <|user|>the dog<|end|> <|assistant|>")
    last = ids("falls<|end|>")
    assert chat.tokens == before + first + between + last  # the space after it is cut off
    expected = [0] * len(before) + [1] * len(first) + [0] * len(between) + [1] * len(last)
    assert np.array_equal(chat.supervised, np.array(expected, dtype=bool))


def test_a_slow_tokenizer_gives_the_same(monkeypatch):
    tokenizer = tokenizer_with(CHATML)
    fast = ChatEncoder(tokenizer).encode(CHAT)
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda self: False))
    slow = ChatEncoder(tokenizer).encode(CHAT)
    assert slow.tokens == fast.tokens
    assert np.array_equal(slow.supervised, fast.supervised)


def test_turns_that_the_template_rewrites_are_history_only():
    tokenizer = tokenizer_with(FORGETFUL)
    chat = ChatEncoder(tokenizer).encode(CHAT)
    assert learnt_texts(FORGETFUL) == ["<|think|>falls<|end|>"]
    assert chat.unlearnt_turns == 1
    assert "<|assistant|>jumps over<|end|>" in tokenizer.decode(chat.tokens)
    assert learnt_texts(FORGETFUL, CHAT[:3]) == ["<|think|>jumps over<|end|>"]


def test_a_turn_without_an_end_token_is_learnt_to_its_last_character():
    assert learnt_texts(NO_END) == ["jumps over", "falls"]


def test_a_generation_prompt_that_the_turn_does_not_begin_with_is_a_bad_row():
    template = CHATML + "{% if add_generation_prompt %}<|think|>{% endif %}"
    with pytest.raises(BadRow, match="rewrites its turns"):
        learnt_texts(template)


def test_options_reach_the_template():
    template = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ more }}")
    assert learnt_texts(template, CHAT[:3], more=" dog") == ["jumps over dog<|end|>"]


def test_a_token_across_the_border_is_the_prompts():
    tokenizer = tokenizer_with(CHATML.replace("<|assistant|>", "the"))
    chat = ChatEncoder(tokenizer)
    text = "thethe quick"
    tokens, (count,) = chat._tokenize(text, [4])
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start, _ = whole["offset_mapping"][count - 1]
    assert tokens == whole["input_ids"]
    assert start < 4
    assert count == len(tokens) or whole["offset_mapping"][count][0] >= 4


def test_a_template_that_refuses_is_a_bad_row_with_its_reason():
    template = "{{ raise_exception('no system please') }}"
    with pytest.raises(BadRow, match="does not take it .no system please"):
        learnt_texts(template)


def test_a_tokenizer_without_a_template_cannot_encode_chats():
    tokenizer = tokenizer_with("")
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(tokenizer)


def test_a_cut_answer_has_no_end():
    encoder = ChatEncoder(tokenizer_with(CHATML))
    whole = encoder.encode(CHAT)
    cut = encoder.without_end(whole)
    assert cut.tokens == whole.tokens[:-1]
    assert len(cut.supervised) == len(cut.tokens)
