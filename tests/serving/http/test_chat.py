"""Chats, whole and streamed."""

import math

import pytest

from tests.cli import tiny
from tests.serving.fake import MODEL, OTHER
from tests.serving.http.conftest import error_of, events


def test_a_whole_chat(client):
    reply = client.chat().json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == MODEL
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "the quick brown fox", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (sequence,) = client.service.sequences
    tokens = len(client.service.tokenizer("the quick brown fox")["input_ids"]) + 1
    assert reply["usage"]["prompt_tokens"] == len(sequence.prompt)
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["usage"]["total_tokens"] == len(sequence.prompt) + tokens
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    cycles = math.ceil((tokens - 1) / 3)
    drafts = reply["usage"]["completion_tokens_details"]
    assert sum(drafts.values()) == 4 * cycles
    assert drafts["accepted_prediction_tokens"] >= 2 * (cycles - 1)


def test_what_is_asked_for_reaches_the_engine(client):
    client.chat(
        n=3, seed=7, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, max_completion_tokens=9,
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, stop="fox",
        ignore_eos=True, logprobs=True, top_logprobs=2, user="me", metadata={"a": "b"},
        store=False, domino={"speculate": False, "reuse": False},
    )  # fmt: skip
    assert [sequence.params.seed for sequence in client.service.sequences] == [7, 8, 9]
    assert not any(sequence.speculate or sequence.reuse for sequence in client.service.sequences)
    params = client.service.sequences[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.05)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert (params.repetition_penalty, params.max_new_tokens) == (1.1, 9)
    assert (params.stop, params.ignore_eos, params.logprobs) == (("fox",), True, 2)


def test_defaults_are_openais(client):
    client.chat()
    (sequence,) = client.service.sequences
    params = sequence.params
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (1, 1, 0, None)
    assert params.max_new_tokens == client.service.limits.max_new_tokens
    assert sequence.speculate
    assert sequence.reuse
    client.chat()
    assert client.service.sequences[0].params.seed != client.service.sequences[1].params.seed


def test_an_answer_may_take_what_the_prompt_leaves(client):
    client.service.limits = type(client.service.limits)(context=20, max_new_tokens=128)
    client.chat()
    (sequence,) = client.service.sequences
    assert len(sequence.prompt) + sequence.params.max_new_tokens == 20


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_no_temperature_is_greedy(client, temperature):
    client.chat(temperature=temperature)
    assert not client.service.sequences[0].params.samples


@pytest.mark.parametrize(("seed", "drawn"), [(-1, 2**62 - 1), (2**62 - 1, 2**62 - 1), (0, 0)])
def test_every_seed_of_openais_is_one(client, seed, drawn):
    client.chat(seed=seed, n=2)
    seeds = [sequence.params.seed for sequence in client.service.sequences]
    assert seeds == [drawn, (drawn + 1) % 2**62]


def test_messages_of_every_kind(client):
    client.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            {"role": "user", "content": "d", "name": "eve"},
        ]
    )  # fmt: skip
    (messages, _) = client.service.chats[0]
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d", "name": "eve"},
    ]


def test_a_template_that_knows_developers_gets_them(client):
    client.service.tokenizer.chat_template = "{# developer #}" + tiny.TEMPLATE
    client.chat(messages=[{"role": "developer", "content": "x"}])
    assert client.service.chats[0][0][0]["role"] == "developer"


def test_variables_of_the_template_alone_may_be_set(client):
    client.service.tokenizer.chat_template = tiny.TEMPLATE + "{% if enable_thinking %}!{% endif %}"
    assert client.chat(chat_template_kwargs={"enable_thinking": True}).status_code == 200
    assert client.service.chats[0][1] == {"enable_thinking": True}
    wrong = ("thinking", "chat_template", "tools", "messages", "add_generation_prompt", "a b", "")
    for name in wrong:
        error = error_of(client.chat(chat_template_kwargs={name: "{{ 1 }}"}))
        assert error["code"] == "unknown_parameter"
        assert error["param"] == f"chat_template_kwargs.{name}"


def test_a_stream_is_a_role_then_blocks_then_a_reason(client):
    chunks = events(client.chat(stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk or "domino" in chunk for chunk in chunks)
    first, *content, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"
    assert {choice["finish_reason"] for choice in (first, *content)} == {None}
    assert "".join(choice["delta"]["content"] for choice in content) == "the quick brown fox"
    blocks = len(client.service.streams[0].outputs)
    assert len(content) in (blocks, blocks - 1)  # the last may hold the end alone


def test_usage_comes_last_in_a_stream_that_wants_it(client):
    whole = client.chat().json()["usage"]
    chunks = events(client.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}


def test_choices_of_a_stream_are_told_apart(client):
    chunks = events(client.chat(stream=True, n=3))
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in own) == "the quick brown fox"


def test_a_prompt_with_several_answers_counts_once(client):
    one, three = client.chat().json()["usage"], client.chat(n=3).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["prompt_tokens_details"] == one["prompt_tokens_details"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["br", ["zzz", "brown"], "n f"])
def test_stop_strings_end_an_answer_and_are_no_part_of_it(client, stop, stream):
    expected = "the quick brown fox".split(stop if isinstance(stop, str) else "brown")[0]
    if stream:
        choices = [c["choices"][0] for c in events(client.chat(stop=stop, stream=True))]
        assert "".join(c["delta"].get("content", "") for c in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"
        return
    (choice,) = client.chat(stop=stop).json()["choices"]
    assert choice["message"]["content"] == expected
    assert choice["finish_reason"] == "stop"


def test_length_ends_an_answer(client):
    (choice,) = client.chat(max_tokens=2).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "the quick brown fox".startswith(choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_might_have_been_a_stop_string_is_text_after_all(client, stream):
    answer = client.chat(stop="fox hunt", stream=stream)
    if stream:
        said = "".join(c["choices"][0]["delta"].get("content", "") for c in events(answer))
    else:
        said = answer.json()["choices"][0]["message"]["content"]
    assert said == "the quick brown fox"


def test_logprobs_are_those_of_the_text(client):
    (choice,) = client.chat(logprobs=True, top_logprobs=3).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "the quick brown fox"
    assert b"".join(bytes(each["bytes"]) for each in content) == b"the quick brown fox"
    name = client.service.tokenizer.convert_ids_to_tokens(OTHER)
    for each in content:
        assert each["logprob"] == pytest.approx(math.log(0.75))
        own, other, never = each["top_logprobs"]
        assert (own["token"], own["logprob"]) == (each["token"], each["logprob"])
        assert other["token"] == name
        assert never == {"token": "<|mask|>", "logprob": -9999.0, "bytes": [*b"<|mask|>"]}


def test_logprobs_without_alternatives(client):
    (choice,) = client.chat(logprobs=True).json()["choices"]
    assert {len(each["top_logprobs"]) for each in choice["logprobs"]["content"]} == {0}


def test_streamed_logprobs_come_with_their_text(client):
    whole = client.chat(logprobs=True, stop="brow").json()["choices"][0]["logprobs"]["content"]
    chunks = events(client.chat(logprobs=True, stop="brow", stream=True))
    text, tokens = "", []
    for choice in (chunk["choices"][0] for chunk in chunks):
        text += choice["delta"].get("content", "")
        tokens += (choice["logprobs"] or {}).get("content", [])
        started = "".join(each["token"] for each in tokens[:-1])
        assert text.startswith(started)
    assert tokens == whole
    assert text == "the quick "


def test_half_a_character_has_its_own_bytes(make_client):
    client = make_client(text="a→é")
    reply = client.chat(logprobs=True).json()["choices"][0]
    content = reply["logprobs"]["content"]
    assert reply["message"]["content"] == "a→é"
    assert b"".join(bytes(each["bytes"]) for each in content) == "a→é".encode()
    assert [each["token"] for each in content][:2] == ["a", "\\xe2"]
