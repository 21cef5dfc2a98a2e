"""The official client, and slow readers, against a real server with a tiny real model."""

import contextlib
import json
import socket
import threading

import httpx
import pytest
import torch

from domino_spec.api import DominoDecoder
from tests.serving.live import live, tiny_decoder
from tests.support.families import make_target
from tests.support.lazy import LazyModule
from tests.support.tokens import small_tokenizer

openai = LazyModule("openai")
KEY = "a key"
CHAT = [{"role": "user", "content": "the dog a"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server():
    with live(page=False, slots=4, api_keys=(KEY,)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def alone():
    """What plain decoding writes by itself."""
    decoder = DominoDecoder(make_target("llama"), None, small_tokenizer(), engine="reference")
    return lambda prompt, tokens=12, **how: decoder.generate(prompt, max_new_tokens=tokens, **how)


def test_a_chat_is_what_the_model_says(client, alone):
    expected = alone(CHAT)
    reply = client.chat.completions.create(messages=CHAT, **GREEDY)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens == len(expected.prompt_tokens)
    assert reply.usage.completion_tokens == len(expected.tokens)
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 0
    assert details.rejected_prediction_tokens > 0  # a random drafter is mostly wrong
    assert reply._request_id.startswith("req_")


def test_a_streamed_chat_says_the_same(client, alone):
    expected = alone(CHAT)
    stream = client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == expected.text
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.tokens)
    with client.chat.completions.stream(messages=CHAT, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        whole = stream.current_completion_snapshot
    assert {"chunk", "content.delta"} <= kinds
    assert whole.choices[0].message.content == expected.text


def test_completions_of_every_kind(client, alone):
    ids = small_tokenizer()("the quick")["input_ids"]
    for prompt, single in (("the quick", True), (["the quick", "a dog"], False), (ids, True)):
        reply = client.completions.create(prompt=prompt, **GREEDY)
        prompts = [prompt] if single else prompt
        assert [choice.text for choice in reply.choices] == [alone(p).text for p in prompts]
    reply = client.completions.create(prompt=[ids, ids[:2]], **GREEDY)
    assert [c.text for c in reply.choices] == [alone(ids).text, alone(ids[:2]).text]
    chunks = client.completions.create(prompt="the quick", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone("the quick").text


def test_without_drafts_the_text_is_the_same(client, alone):
    reply = client.chat.completions.create(
        messages=CHAT, extra_body={"domino": {"speculate": False}}, **GREEDY
    )
    assert reply.choices[0].message.content == alone(CHAT).text
    assert reply.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_seeds_and_choices(client):
    how = {"model": "tiny", "messages": CHAT, "max_tokens": 12, "temperature": 1.5}

    def texts(**more):
        reply = client.chat.completions.create(**how, **more)
        return [choice.message.content for choice in reply.choices]

    four = texts(n=4, seed=11)
    assert len(set(four)) > 1
    assert texts(n=4, seed=11) == four
    assert [texts(seed=11 + choice)[0] for choice in range(4)] == four
    assert len({texts()[0] for _ in range(4)}) > 1  # without a seed, another every time


def test_stop(client, alone):
    whole = alone(CHAT, 24).text
    stop = whole[8:11]
    how = {**GREEDY, "max_tokens": 24}
    choice = client.chat.completions.create(messages=CHAT, stop=[stop], **how).choices[0]
    assert choice.message.content == whole.split(stop)[0]
    assert choice.finish_reason == "stop"


def test_everything_that_may_be_asked_at_once(client):
    reply = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=6, temperature=0.8, top_p=0.9, seed=1,
        presence_penalty=0.5, frequency_penalty=0.5, user="me", metadata={"a": "b"}, store=False,
        response_format={"type": "text"}, n=2, stop=["zzz"],
        extra_body={
            "top_k": 2**31 - 1, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True,
        },
    )  # fmt: skip
    assert [choice.finish_reason for choice in reply.choices] == ["length"] * 2
    assert reply.usage.completion_tokens == 12


@pytest.mark.parametrize("extreme", [
    {"temperature": 2}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"frequency_penalty": -2},
    {"extra_body": {"repetition_penalty": 0.01}}, {"extra_body": {"repetition_penalty": 100}},
    {"extra_body": {"min_p": 1.0}}, {"extra_body": {"top_k": 1}}, {"presence_penalty": 2},
])  # fmt: skip
def test_the_ends_of_every_range(client, extreme):
    how = {"model": "tiny", "messages": CHAT, "max_tokens": 20, "seed": 3, **extreme}
    extra = {**how.pop("extra_body", {}), "ignore_eos": True}
    reply = client.chat.completions.create(**how, extra_body=extra)
    assert reply.usage.completion_tokens == 20


def test_errors_are_the_clients_own(client, server):
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.BadRequestError) as long:
        create(model="tiny", messages=[{"role": "user", "content": "the fox " * 200}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as asked:
        create(model="tiny", messages=CHAT, max_tokens=5000)
    assert (asked.value.code, asked.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as strange:
        client.completions.create(model="tiny", prompt=[10**6])
    assert strange.value.code == "invalid_value"
    assert strange.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="tiny", messages=CHAT, prediction={"type": "content", "content": "x"})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "prediction")
    with pytest.raises(openai.AuthenticationError) as locked:
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="no", max_retries=0).models.list()
    assert locked.value.code == "invalid_api_key"
    assert locked.value.request_id.startswith("req_")


def cancelled(server) -> float:
    page = server.service.engine._metrics.render().decode()
    return float(page.split('domino_answers_ended_total{reason="cancelled"} ')[1].split("\n")[0])


def soon(true) -> bool:
    """Whether it comes to be: what another thread does is waited for, not timed."""
    return any(true() or threading.Event().wait(0.005) for _ in range(4000))


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_slot(server, stream, monkeypatch):
    """Over a real connection, in the middle of an answer: it stands still until that is noticed."""
    engine, before, steps, seen = server.service.engine, cancelled(server), [], threading.Event()
    real = engine.engine.step

    def step():
        steps.append(engine.running)
        if len(steps) == 3:
            assert seen.wait(60)
        return real()

    monkeypatch.setattr(engine.engine, "step", step)
    body = {**GREEDY, "messages": CHAT, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    address = httpx.URL(server.address)
    with socket.create_connection((address.host, address.port)) as hasty:
        hasty.sendall(head.encode() + sent)
        if stream:
            assert hasty.recv(100).startswith(b"HTTP/1.1 200")
        assert soon(lambda: len(steps) == 3)
    assert soon(lambda: engine._cancelled)
    seen.set()
    assert soon(lambda: cancelled(server) == before + 1)
    assert soon(lambda: not (engine.running or engine.waiting))
    assert len(steps) == 3, "it went on without a client"


def test_a_full_queue_is_a_rate_limit(monkeypatch):
    with live(page=False, slots=1, max_queue=1) as small:
        make = openai.OpenAI(base_url=f"{small.address}/v1", api_key="none", max_retries=0)
        how = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
        engine, go, answers = small.service.engine, threading.Event(), []
        real = engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda: go.wait(60) and real())

        def two():
            answers.append(make.chat.completions.create(messages=CHAT, n=2, max_tokens=2, **how))

        first = threading.Thread(target=two)
        first.start()
        try:
            assert soon(lambda: engine.running + engine.waiting == 2)
            with pytest.raises(openai.RateLimitError) as full:
                make.chat.completions.create(messages=CHAT, max_tokens=2, **how)
        finally:
            go.set()
            first.join()
        assert full.value.code == "rate_limit_exceeded"
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert len(answers[0].choices) == 2
        with pytest.raises(openai.BadRequestError, match="3 sequences are requested at once"):
            make.chat.completions.create(messages=CHAT, n=3, max_tokens=2, **how)


def test_metrics_of_a_real_run(server, client):
    client.chat.completions.create(messages=CHAT, **GREEDY)
    headers = {"authorization": f"Bearer {KEY}"}
    page = httpx.get(f"{server.address}/metrics", headers=headers).text
    numbers = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
    own = float(numbers['domino_tokens_total{kind="own"}'])
    accepted = float(numbers['domino_tokens_total{kind="accepted"}'])
    firsts = float(numbers["domino_time_to_first_token_seconds_count"])
    assert own + accepted == firsts + float(numbers["domino_tokens_per_cycle_sum"])
    assert float(numbers['domino_drafts_offered_total{position="0"}']) > 0
    assert float(numbers["domino_slots"]) == 4
    assert float(numbers["domino_cache_usage"]) == 0


def test_blocks_of_a_real_run(server, alone):
    body = {**GREEDY, "messages": CHAT, "stream": True, "domino": {"blocks": True}}
    headers = {"authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{server.address}/v1/chat/completions", json=body, headers=headers)
    chunks = [json.loads(line[6:]) for line in found.text.split("\n\n")[:-2]]
    blocks = [chunk["domino"] for chunk in chunks if "domino" in chunk]
    assert [token["id"] for block in blocks for token in block["tokens"]] == alone(CHAT).tokens
    assert [block["cycle"] for block in blocks] == list(range(len(blocks)))
    assert all(0 < token["probability"] <= 1 for block in blocks for token in block["tokens"])


def test_logprobs_are_the_models_own(client, alone):
    expected = alone(CHAT)
    ids = torch.tensor([[*expected.prompt_tokens, *expected.tokens]])
    with torch.no_grad():
        logits = make_target("llama").model(ids).logits[0, len(expected.prompt_tokens) - 1 :]
    truth = logits.float().log_softmax(-1)
    reply = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    choice = reply.choices[0]
    content = choice.logprobs.content
    assert "".join(each.token for each in content) == choice.message.content
    assert len(content) > 5
    for each, token, row in zip(content, expected.tokens, truth, strict=False):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = [top.logprob for top in each.top_logprobs]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_penalties_change_what_is_said(client, alone):
    """Greedy, so that nothing but the penalty can."""
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}):
        reply = client.chat.completions.create(
            messages=CHAT, **{**GREEDY, "max_tokens": 40}, **penalty
        )
        assert reply.choices[0].message.content != alone(CHAT, 40).text


def test_biases_and_minimum_lengths_are_the_reference_loops(client, alone):
    """With drafts and without: every field as the loop that drafts nothing applies it."""
    free = alone(CHAT)
    forced, banned = (free.tokens[0] + 1) % 100, dict.fromkeys(set(free.tokens), -100)
    for how in (
        {"logit_bias": banned},
        {"stop_token_ids": free.tokens[1:3], "min_tokens": 6},
        {"logit_bias": {forced: 100}, "stop_token_ids": (forced,), "min_tokens": 3},
    ):
        expected = alone(CHAT, **how)
        assert expected.tokens != free.tokens
        for speculate in (True, False):
            reply = client.chat.completions.create(
                messages=CHAT, extra_body={**how, "domino": {"speculate": speculate}}, **GREEDY
            )
            assert reply.choices[0].message.content == expected.text
            assert reply.usage.completion_tokens == len(expected.tokens)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=CHAT, logit_bias={"99999": 1}, **GREEDY)
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_prompts_are_scored_as_the_model_scores_them(server, engine):
    prompt = [5, 9, 11, 5, 3, 17, 2]
    with torch.no_grad():
        truth = make_target("llama").model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    with contextlib.ExitStack() as stack:
        if engine == "reference":
            decoder = tiny_decoder(drafter=False, engine=engine)
            server = stack.enter_context(live(decoder, page=False, api_keys=(KEY,)))
        headers = {"authorization": f"Bearer {KEY}"}
        found = httpx.post(f"{server.address}/v1/completions", json=body, headers=headers).json()
    scores = found["choices"][0]["logprobs"]
    expected = [float(row[token]) for row, token in zip(truth, prompt[1:], strict=False)]
    assert scores["token_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = [max(top.values()) for top in scores["top_logprobs"][1:]]
    assert best == pytest.approx(truth.max(dim=-1).values[:-1].tolist(), abs=1e-4)


# Slow readers -------------------------------------------------------------------------------------


LONG = {
    "model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "temperature": 0,
    "max_tokens": 170, "stream": True, "ignore_eos": True,
}  # fmt: skip


def opened(address, body):
    """A stream whose client has a small window and has read nothing yet."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def wait_until(true):
    for _ in range(3000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never happened")


def test_a_slow_reader_stalls_nobody_and_loses_nothing():
    body = {**LONG, "n": 9, "logprobs": True, "top_logprobs": 20}  # megabytes
    with live(slots=9, context=200) as server:
        engine = server.service.engine
        slow = opened(server.address, body)
        wait_until(lambda: engine.running)
        quick = httpx.post(
            f"{server.address}/v1/chat/completions",
            json={**LONG, "stream": False, "max_tokens": 5}, timeout=60,
        )  # fmt: skip
        assert quick.status_code == 200
        wait_until(lambda: not engine.running)  # all is decoded, though it was not read
        received = b""
        while part := slow.recv(65536):
            received += part
        slow.close()
    assert len(received) > 2_000_000
    assert b"data: [DONE]" in received[-200:]
    assert received.count(b'"finish_reason":"length"') == 9
