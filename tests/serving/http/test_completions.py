"""Plain prompts, whole and streamed."""

import math

import pytest

from tests.cli import tiny
from tests.serving.http.conftest import error_of, events


def test_a_whole_completion(client):
    reply = client.complete().json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"] == [
        {"index": 0, "text": "the quick brown fox", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("the fox", 1), (["the", "fox", "dog"], 3), ([10, 11, 12], 1), ([[10, 11], [12]], 2)],
)
def test_prompts_of_every_kind(client, prompt, count):
    reply = client.complete(prompt=prompt, n=2).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * count))
    prompts = [sequence.prompt for sequence in client.service.sequences]
    assert prompts[::2] == prompts[1::2]
    assert len(set(map(tuple, prompts))) == count
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts[::2]))
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(
        2 + choice for choice in range(0, 2 * count, 2)
    )


def test_ids_are_taken_as_they_are(client):
    client.complete(prompt=[[10, 11], [12]])
    assert [sequence.prompt for sequence in client.service.sequences] == [[10, 11], [12]]


def test_every_choice_has_a_seed_of_its_own(client):
    client.complete(prompt=["a", "b"], n=2, seed=5)
    assert [sequence.params.seed for sequence in client.service.sequences] == [5, 6, 7, 8]


def test_sixteen_tokens_unless_told(client):
    client.complete(max_tokens=None)
    assert client.service.sequences[0].params.max_new_tokens == 16


def test_a_streamed_completion(client):
    chunks = events(client.complete(stream=True, stream_options={"include_usage": True}))
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == "the quick brown fox"
    assert choices[-1]["finish_reason"] == "stop"
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert chunks[-1]["usage"] == client.complete().json()["usage"]


def test_logprobs_in_the_shape_of_completions(client):
    (choice,) = client.complete(logprobs=2).json()["choices"]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == "the quick brown fox"
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert scores["token_logprobs"] == pytest.approx([math.log(0.75)] * len(scores["tokens"]))
    for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
        assert top[token] == pytest.approx(math.log(0.75))
        assert len(top) == 2


def test_the_token_itself_is_always_scored(client):
    (choice,) = client.complete(logprobs=0).json()["choices"]
    scores = choice["logprobs"]
    assert [[*top] for top in scores["top_logprobs"]] == [[token] for token in scores["tokens"]]


def test_offsets_are_characters_of_the_text(make_client):
    client = make_client(text="a→b")
    scores = client.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert scores["tokens"] == ["a", "\\xe2", "\\x86", "\\x92", "b"]
    assert scores["text_offset"] == [0, 1, 1, 1, 2]


def test_signs_to_the_model_are_neither_text_nor_scored(make_client):
    user = tiny.SPECIALS.index("<|user|>")
    client = make_client(tokens=[*tiny.make_tokenizer()("fox")["input_ids"], user, 0, 0])
    (choice,) = client.complete(logprobs=0, ignore_eos=True, max_tokens=50).json()["choices"]
    assert choice["text"] == "fox"
    assert "".join(choice["logprobs"]["tokens"]) == "fox"


def test_as_many_answers_as_one_request_may_have(client):
    most = client.service.config.max_choices
    assert client.complete(prompt=["a"] * most).status_code == 200
    assert error_of(client.complete(prompt=["a"] * (most + 1)))["param"] == "prompt"
    assert error_of(client.complete(prompt=["a"] * most, n=2))["param"] == "n"
    assert error_of(client.chat(n=most + 1))["param"] == "n"
