"""Real sockets, a server that misbehaves."""

import asyncio

import pytest

from domino_spec.errors import InputError, UnreachableError
from domino_spec.load import Settings, Side
from domino_spec.load.client import Client, facts_of, model_of
from domino_spec.load.exchange import Exchange
from domino_spec.load.settings import base_url
from tests.load.fake import FACTS, TEXT

SLOW = 0.2  # a deadline that is meant to pass


def ask(fake, kind, *, key=None, **settings):
    settings = Settings(**settings)
    side = Side(name="x", url=fake.url, model="m", api_key=key)

    async def main():
        exchange = Exchange(scheduled=asyncio.get_running_loop().time())
        async with Client(settings) as client:
            await client.ask(side, {"stream": settings.stream, "fake": kind}, exchange)
        return exchange.to_record(exchange.scheduled)

    return asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("kind", ["normal", "bytes", "comments", "no-mark"])
def test_a_stream(fake, endpoint, kind):
    record = ask(fake, kind, endpoint=endpoint)
    assert (record["status"], record["error"]) == (200, None)
    assert record["characters"] == len("".join(TEXT))
    assert len(record["gaps_us"]) == len(TEXT) - 1
    first, last = record["first"] * 1e6, record["last"] * 1e6
    assert sum(record["gaps_us"]) == pytest.approx(last - first, abs=1.5)
    assert (record["tokens"], record["prompt_tokens"], record["cached_tokens"]) == (7, 10, 4)
    assert (record["accepted"], record["rejected"]) == (3, 9)
    assert record["finish_reason"] == "stop"
    assert record["chunk_tokens"] is None
    times = ["scheduled", "sent", "first", "last", "ended"]
    assert sorted(times, key=lambda name: record[name]) == times


@pytest.mark.parametrize("kind", ["blocks", "logprobs", "continuous"])
def test_servers_that_tell_tokens(fake, kind):
    assert ask(fake, kind)["chunk_tokens"] == [1, 2, 2, 2]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_whole_answer(fake, endpoint):
    record = ask(fake, "normal", endpoint=endpoint, stream=False)
    assert (record["error"], record["tokens"], record["finish_reason"]) == (None, 7, "length")
    assert record["text_sha256"] == ask(fake, "normal", endpoint=endpoint)["text_sha256"]
    assert record["first"] is None


@pytest.mark.parametrize(
    ("kind", "status", "error", "message"),
    [
        ("busy", 429, "busy", "come back"),
        ("busy-without", 429, "HTTP 429", "come back"),
        ("crash", 500, "HTTP 500", "oh no"),
        ("gone", None, "connection", "ServerDisconnected"),
        ("cut", 200, "broken stream", "ClientPayloadError"),
        ("endless", 200, "broken stream", "before every choice had finished"),
        ("rubbish", 200, "malformed", "{not json"),
        ("latin", 200, "malformed", "not UTF-8"),
        ("json", 200, "malformed", "application/json came"),
        ("failed", 200, "error in stream", "out of luck"),
    ],
)
def test_failures_have_classes(fake, kind, status, error, message):
    record = ask(fake, kind)
    assert (record["status"], record["error"]) == (status, error)
    assert message in record["message"]
    assert record["ended"] >= record["sent"]
    assert record["retry_after"] == ("3" if kind == "busy" else None)


def test_a_deadline(fake):
    record = ask(fake, "silent", timeout=SLOW)
    assert (record["status"], record["error"]) == (200, "timeout")
    assert record["ended"] >= SLOW


def test_nobody_there(fake):
    fake.port = 1
    assert ask(fake, "normal")["error"] == "connection"


def test_the_key_goes_into_its_header_only(fake):
    ask(fake, "normal", key="sekrit")
    assert "Authorization: Bearer sekrit" in fake.headers[-1]
    ask(fake, "normal")
    assert "Authorization" not in fake.headers[-1]


def test_what_servers_tell(fake):
    async def main(url):
        async with Client(Settings()) as client:
            side = Side(name="x", url=url, model="m")
            return await model_of(client, url, None), await facts_of(client, side)

    assert asyncio.run(main(fake.url)) == ("org/tiny", FACTS)
    fake.ours = False
    assert asyncio.run(main(fake.url)) == ("org/tiny", None)
    with pytest.raises(UnreachableError, match="names no model; name it with --model"):
        asyncio.run(main(f"{fake.url}/elsewhere"))
    with pytest.raises(UnreachableError, match="nothing answers at http://127.0.0.1:1/"):
        asyncio.run(main("http://127.0.0.1:1"))


def test_addresses():
    for text in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert base_url(text) == "http://h:1"
    for text in ("h:1", "ftp://h", "http://", "http://h?x=1"):
        with pytest.raises(InputError, match="expected a URL"):
            base_url(text)
    with pytest.raises(InputError, match="holds a password") as caught:
        base_url("http://me:sekrit@h")
    assert "sekrit" not in str(caught.value)
