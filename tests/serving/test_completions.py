"""The completions endpoints: chats and plain prompts, whole and streamed."""

import asyncio
import json
import math

import pytest

from domino_spec.serving.protocol import ChatCompletionChunk, CompletionChunk
from tests.cli import tiny
from tests.serving.conftest import HELLO, Client, error_of, events
from tests.serving.fake import MODEL, OTHER
from tests.serving.scripted import make_scripted


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
        store=False, domino={"speculate": False, "reuse": False, "accept": "rejection"},
    )  # fmt: skip
    assert [sequence.params.seed for sequence in client.service.sequences] == [7, 8, 9]
    assert not any(sequence.speculate or sequence.reuse for sequence in client.service.sequences)
    assert {sequence.params.rule for sequence in client.service.sequences} == {"rejection"}
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
    assert client.service.sequences[0].params.rule == "block", "the seed is the server's own"


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("options", [{}, {"domino": {"blocks": True}}, {"n": 2}])
def test_events_are_as_the_api_describes_them(client, options, usage):
    more = {"stream": True, "stream_options": {"include_usage": usage}, **options}
    for reply, model in (
        (client.chat(logprobs=True, top_logprobs=2, **more), ChatCompletionChunk),
        (client.chat(**more), ChatCompletionChunk),
        (client.complete(logprobs=2, **more), CompletionChunk),
        (client.complete(**more), CompletionChunk),
    ):
        for event in events(reply):
            told = model.model_validate(event, strict=True)
            assert told.model_dump(exclude_unset=True) == event
            assert ("usage" in event) == usage


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_no_temperature_is_greedy(client, temperature):
    client.chat(temperature=temperature)
    assert not client.service.sequences[0].params.samples


@pytest.mark.parametrize(("seed", "drawn"), [(-1, 2**62 - 1), (2**62 - 1, 2**62 - 1), (0, 0)])
def test_every_seed_of_openais_is_one(client, seed, drawn):
    client.chat(seed=seed, n=2)
    assert {sequence.params.rule for sequence in client.service.sequences} == {"coupled"}
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


def test_a_template_that_knows_developers_gets_them():
    client = Client(make_scripted("x", template="{# developer #}" + tiny.TEMPLATE))
    client.chat(messages=[{"role": "developer", "content": "x"}])
    assert client.service.chats[0][0][0]["role"] == "developer"


def test_variables_of_the_template_alone_may_be_set():
    template = tiny.TEMPLATE + "{% if enable_thinking %}!{% endif %}"
    client = Client(make_scripted("x", template=template))
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


@pytest.mark.parametrize("stream", [False, True])
def test_what_might_have_become_a_stop_string_comes_at_the_end(client, stream):
    found = client.chat(stop="ox!", stream=stream)
    text = (
        "".join(c["choices"][0]["delta"].get("content", "") for c in events(found))
        if stream
        else found.json()["choices"][0]["message"]["content"]
    )
    assert text == "the quick brown fox"


def test_length_ends_an_answer(client):
    (choice,) = client.chat(max_tokens=2).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert "the quick brown fox".startswith(choice["message"]["content"])


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


# Plain prompts ------------------------------------------------------------------------------------


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


# Blocks -------------------------------------------------------------------------------------------


def blocks_of(chunks):
    return [chunk["domino"] for chunk in chunks if "domino" in chunk]


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_every_block_is_told(client, kind):
    chunks = events(getattr(client, kind)(stream=True, domino={"blocks": True}))
    blocks = blocks_of(chunks)
    outputs = client.service.streams[0].outputs
    assert [block["cycle"] for block in blocks] == list(range(len(outputs)))
    assert [block["accepted"] for block in blocks] == [output.accepted for output in outputs]
    assert [[t["id"] for t in b["tokens"]] for b in blocks] == [[*o.tokens] for o in outputs]
    tokens = [token for block in blocks for token in block["tokens"]]
    assert [token["position"] for token in tokens] == list(range(len(tokens)))
    assert {round(token["probability"], 6) for token in tokens} == {0.75}
    for block in blocks:
        accepted = [token["accepted"] for token in block["tokens"]]
        assert accepted == [place < block["accepted"] for place in range(len(accepted))]
    assert "".join(token["text"] for token in tokens) == "the quick brown fox<|end|>"


def test_a_block_is_a_chunk_even_if_it_adds_no_text(make_client):
    client = make_client(text="→")  # three bytes: the character comes with the last
    chunks = events(client.chat(stream=True, domino={"blocks": True}))
    texts = [token["text"] for block in blocks_of(chunks) for token in block["tokens"]]
    assert texts == ["", "", "→", "<|end|>"]
    told = [c["choices"][0]["delta"]["content"] for c in chunks if "domino" in c]
    assert told == ["", "→"]


def test_logprobs_and_blocks_do_not_mind_each_other(client):
    chunks = events(
        client.chat(stream=True, logprobs=True, top_logprobs=2, domino={"blocks": True})
    )
    content = [
        each
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for each in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert "".join(each["token"] for each in content) == "the quick brown fox"
    assert {len(each["top_logprobs"]) for each in content} == {2}
    assert blocks_of(chunks)


def test_blocks_are_for_streams(client):
    error = error_of(client.chat(domino={"blocks": True}))
    assert error["param"] == "domino.blocks"
    assert "stream" in error["message"]


# Disconnecting clients ----------------------------------------------------------------------------


async def hang_up(client, *, stream: bool, after: int = 0, held_at: int | None = 1) -> list[dict]:
    """Ask, take so many messages, go; what was sent until then."""
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": stream}).encode()
    sent: list[dict] = []
    waiting = asyncio.Event()
    asked = False

    async def receive():
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        if len(sent) == after:
            waiting.set()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http",
        "http_version": "1.1", "root_path": "", "raw_path": b"/v1/chat/completions",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }  # fmt: skip
    client.service.held_at = held_at
    client.service.held = asyncio.Event()  # never set: nothing but hanging up ends this
    doing = asyncio.ensure_future(client.app(scope, receive, send))
    if held_at is None:  # while its prompt waits to be tokenised
        client.service.encode_chat = lambda *_, **__: waiting.set() or asyncio.Event().wait()
    elif not after:
        while not (client.service.streams and client.service.streams[0].position == held_at):
            await asyncio.sleep(0)
        waiting.set()
    async with asyncio.timeout(30):
        await doing
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, "tasks are left"
    return sent


@pytest.mark.parametrize(
    ("stream", "after", "held_at"), [(True, 2, 1), (True, 0, 0), (False, 0, 1), (False, 0, 0)]
)
def test_hanging_up_cancels(client, stream, after, held_at):
    sent = asyncio.run(hang_up(client, stream=stream, after=after, held_at=held_at))
    (stream,) = client.service.streams
    assert stream.cancelled
    assert len(sent) == after
    assert not any(message.get("more_body") is False for message in sent)


def test_hanging_up_is_counted(client):
    asyncio.run(hang_up(client, stream=False))
    page = client.get("/metrics").text
    path = "/v1/chat/completions"
    assert f'domino_http_responses_total{{method="POST",path="{path}",status="499"}} 1.0' in page


def test_an_answer_that_was_read_to_its_end_is_not_cancelled(client):
    for stream in (False, True):
        assert client.chat(stream=stream).status_code == 200
    assert [stream.cancelled for stream in client.service.streams] == [False, False]


def test_a_prompt_that_waits_to_be_tokenised_is_left_when_its_client_goes(client):
    assert asyncio.run(hang_up(client, stream=False, after=0, held_at=None)) == []
    assert not client.service.sequences
