"""Randomised stress test over HTTP: many requests, some of them bad, some cancelled."""

import asyncio
import contextlib
import gc
import json
import mmap
import random
import re
import threading
from pathlib import Path

import httpx
import pytest

from domino_spec.api import DominoDecoder
from domino_spec.decoding import Sequence, TextStream
from domino_spec.serving.engine_client import OutputStream
from tests.serving.live import live
from tests.support.families import make_target
from tests.support.tokens import LINES, small_tokenizer

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


async def leave_early(client, rng, messages):
    """Wherever the request may be: in its prompt, in the queue, in a slot."""
    long = [*messages, {"role": "user", "content": "the quick fox " * rng.choice([1, 2_000])}]
    body = {"model": "tiny", "messages": long, "max_tokens": MOST}
    with contextlib.suppress(httpx.TimeoutException):
        await client.post(CHAT, json=body, timeout=httpx.Timeout(120, read=rng.random() / 50))


async def send_all(address, pool, expected, counts, *, todo, concurrency):
    todo = iter(todo)
    limits = httpx.Limits(max_connections=concurrency)

    async def one(client, number):
        own = random.Random(number)
        messages = own.choice(pool)
        kinds = ["bad", "whole", "text", "streamed", "leave", "leave early"]
        kind = own.choices(kinds, [2, 3, 2, 5, 2, 1])[0]
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "bad":
            await bad(client, own)
        elif kind == "leave":
            await streamed(client, own, messages, expected, leave=True)
        elif kind == "leave early":
            await leave_early(client, own, messages)
        else:
            await {"whole": whole, "text": text, "streamed": streamed}[kind](
                client, own, messages, expected
            )

    async def several(client):
        for number in todo:
            await one(client, number)

    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        await asyncio.gather(*(several(client) for _ in range(concurrency)))


def settled(server):
    """Give what was cancelled last a moment to leave; then what is still there."""
    engine, http = server.service.engine, server.server_state
    for _ in range(1000):
        if not (engine.running or engine.waiting or http.tasks or http.connections):
            break
        threading.Event().wait(0.01)
    return engine.running, engine.waiting, len(http.tasks), len(http.connections)


def kept():
    """How many sequences and streams there are."""
    gc.collect()
    return sum(type(thing) in (Sequence, OutputStream) for thing in gc.get_objects())


def open_files():
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def resident():
    """Bytes, where the system tells."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * mmap.PAGESIZE if status.exists() else 0


def soak(rounds, *, requests, concurrency):
    """Memory after each round; everything else is as it was before the first."""
    counts, pool, expected, memory = {}, prompts(random.Random(0)), Expected(), []
    for messages in pool:
        expected.learn(messages)
        expected.learn(messages[-1]["content"])
    threads, before = threading.active_count(), kept()
    with live(slots=8, context=200, max_queue=64) as server:
        for body, _ in BAD:  # what begins at its first use, such as a worker process, is no leak
            httpx.post(server.address + CHAT, **body, headers={"content-type": "application/json"})
        files = open_files()
        for turn in range(rounds):
            todo = range(turn * requests, (turn + 1) * requests)
            sending = send_all(
                server.address, pool, expected, counts, todo=todo, concurrency=concurrency
            )
            asyncio.run(sending)
            assert settled(server) == (0, 0, 0, 0)
            page = httpx.get(f"{server.address}/metrics").text
            assert "domino_answers_running 0.0" in page
            assert 'domino_answers_ended_total{reason="failed"} 0.0' in page
            assert not re.search(r'status="5\d\d"', page)
            gc.collect()
            memory.append(resident())
        engine = server.service.engine
        assert [engine._held, engine._added, engine._cancelled] == [{}, [], {}]
        assert sorted(engine.engine.scheduler.blocks.free) == list(range(8))
        assert open_files() <= files
    assert threading.active_count() == threads
    assert sum(counts.values()) == rounds * requests
    assert min(counts.values()) > 3, counts
    del server, engine
    assert kept() == before
    return memory


def test_every_request_gets_what_it_would_alone_and_leaves_nothing():
    soak(1, requests=100, concurrency=24)


@pytest.mark.slow
def test_a_thousand_requests_leave_no_more_memory_than_the_first_hundreds():
    first, *_, last = soak(5, requests=200, concurrency=32)
    assert last - first < 32e6
