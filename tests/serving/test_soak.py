"""Randomised stress test over HTTP: many requests, some of them bad, some cancelled."""

import asyncio
import gc
import json
import random
import threading

import httpx

from domino_spec.api import DominoDecoder
from domino_spec.decoding import Sequence, TextStream
from domino_spec.serving.async_engine import OutputStream
from tests.serving.live import live
from tests.support.families import make_target
from tests.support.tokens import LINES, small_tokenizer

REQUESTS, CONCURRENCY = 120, 24
WORDS = " ".join(LINES).replace(",", "").split()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


MOST = 16


class Expected:
    """What plain decoding alone writes, one prompt at a time; a shorter answer is its beginning."""

    def __init__(self):
        self._decoder = DominoDecoder(
            make_target("llama"), None, small_tokenizer(), engine="reference"
        )
        self._known = {}

    def learn(self, prompt):
        found = self._decoder.generate(prompt, max_new_tokens=MOST)
        self._known[json.dumps(prompt)] = found.tokens

    def __call__(self, prompt, count):
        tokens = self._known[json.dumps(prompt)][:count]
        stream = TextStream(small_tokenizer())
        return tokens, "".join(map(stream.push, tokens)) + stream.finish()


def prompts(rng):
    """Few enough to meet again, some with a beginning in common."""
    system = {"role": "system", "content": " ".join(WORDS[:6])}
    return [
        [*([system] if number % 3 else []), {"role": "user", "content": " ".join(words)}]
        for number in range(8)
        for words in [rng.choices(WORDS, k=rng.randint(1, 12))]
    ]


BAD = [
    ({"content": b"{"}, 400),
    ({"content": b"\xff\xfe"}, 400),
    ({"json": {"model": "tiny"}}, 400),
    ({"json": {"model": "other", "messages": [{"role": "user", "content": "a"}]}}, 404),
    ({"json": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "n": -1}}, 400),
    ({"json": {"model": "tiny", "messages": [{"role": "user", "content": "a " * 500}]}}, 400),
    (
        {
            "json": {
                "model": "tiny",
                "messages": [{"role": "user", "content": "a"}],
                "guided_regex": "(?=a)b",
            }
        },
        400,
    ),
]


async def bad(client, rng):
    body, status = rng.choice(BAD)
    found = await client.post(CHAT, **body, headers={"content-type": "application/json"})
    assert found.status_code == status, found.text
    assert found.json()["error"]["message"]


async def whole(client, rng, messages, expected):
    tokens = rng.randint(1, MOST)
    found = await client.post(
        CHAT,
        json={"model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0},
    )
    assert found.status_code == 200, found.text
    alone, words = expected(messages, tokens)
    body = found.json()
    assert body["choices"][0]["message"]["content"] == words
    assert body["usage"]["completion_tokens"] == len(alone)


async def text(client, rng, messages, expected):
    tokens, prompt = rng.randint(1, MOST), messages[-1]["content"]
    found = await client.post(
        TEXT, json={"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    )
    assert found.status_code == 200, found.text
    assert found.json()["choices"][0]["text"] == expected(prompt, tokens)[1]


async def streamed(client, rng, messages, expected, *, leave=False):
    tokens, after = rng.randint(1, MOST), rng.randint(0, 6)
    body = {
        "model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0,
        "stream": True, "domino": {"blocks": True, "speculate": rng.random() < 0.8},
    }  # fmt: skip
    ids, said, ended = [], "", False
    async with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        number = 0
        async for line in response.aiter_lines():
            if leave and number >= after:
                return
            number += 1
            if not line:
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                ended = True
                break
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            ids += [token["id"] for token in chunk.get("domino", {}).get("tokens", [])]
            said += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if rng.random() < 0.05:
                await asyncio.sleep(0.01)  # a slow reader
    assert ended
    assert (ids, said) == expected(messages, tokens)


async def send_all(address, pool, expected, counts):
    todo = iter(range(REQUESTS))
    limits = httpx.Limits(max_connections=CONCURRENCY)

    async def one(client, number):
        own = random.Random(number)
        messages = own.choice(pool)
        kind = own.choices(["bad", "whole", "text", "streamed", "leave"], [1, 3, 2, 5, 2])[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "bad":
            await bad(client, own)
        elif kind == "leave":
            await streamed(client, own, messages, expected, leave=True)
        else:
            await {"whole": whole, "text": text, "streamed": streamed}[kind](
                client, own, messages, expected
            )

    async def several(client):
        for number in todo:
            await one(client, number)

    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        await asyncio.gather(*(several(client) for _ in range(CONCURRENCY)))


def settled(server):
    """Give what was cancelled last a moment to leave; then what is still there."""
    engine = server.service.engine
    for _ in range(1000):
        if not (engine.running or engine.waiting or server.server_state.tasks):
            break
        threading.Event().wait(0.01)
    return engine.running, engine.waiting, len(server.server_state.tasks)


def kept():
    """How many sequences and streams there are."""
    gc.collect()
    return sum(type(thing) in (Sequence, OutputStream) for thing in gc.get_objects())


def test_every_request_gets_what_it_would_alone_and_leaves_nothing():
    counts, pool, expected = {}, prompts(random.Random(0)), Expected()
    for messages in pool:
        expected.learn(messages)
        expected.learn(messages[-1]["content"])
    threads, before = threading.active_count(), kept()
    with live(slots=8, context=200, max_queue=64) as server:
        asyncio.run(send_all(server.address, pool, expected, counts))
        assert settled(server) == (0, 0, 0)
        page = httpx.get(f"{server.address}/metrics").text
        assert "domino_answers_running 0.0" in page
        assert 'domino_answers_ended_total{reason="failed"} 0.0' in page
    assert threading.active_count() == threads
    assert sum(counts.values()) == REQUESTS
    assert min(counts.values()) > 3, counts
    del server
    assert kept() == before
