"""Streams however they are split, and real sockets to a server that misbehaves."""

import asyncio
import json

import pytest

from domino_spec.errors import InputError, UnreachableError
from domino_spec.load.client import Client, EventStream, RequestTrace
from domino_spec.load.settings import LoadSettings, Side, base_url
from tests.load.fake import FACTS, TEXT

SLOW = 0.2  # a deadline that is meant to pass


def ask(fake, kind, *, key=None, **settings):
    settings = LoadSettings(url=fake.url, **settings)
    side = Side(name="x", url=fake.url, model="m", api_key=key)

    async def main():
        trace = RequestTrace(scheduled=asyncio.get_running_loop().time())
        async with Client.open(settings) as client:
            await client.send(side, {"stream": settings.stream, "fake": kind}, trace)
        return trace.to_record(trace.scheduled)

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


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("kind", ["blocks", "logprobs", "continuous"])
def test_servers_that_count_tokens_per_chunk(fake, endpoint, kind):
    assert ask(fake, kind, endpoint=endpoint)["chunk_tokens"] == [1, 2, 2, 2]


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
        ("unreachable", None, "connection", "Cannot connect"),
        ("gone", None, "connection", "ServerDisconnected"),
        ("cut", 200, "broken stream", "ClientPayloadError"),
        ("endless", 200, "broken stream", "before every choice had finished"),
        ("rubbish", 200, "malformed", "{not json"),
        ("latin", 200, "malformed", "not UTF-8"),
        ("json", 200, "malformed", "got application/json"),
        ("failed", 200, "error in stream", "out of luck"),
    ],
)
def test_failures_have_classes(fake, kind, status, error, message):
    if kind == "unreachable":
        fake.port = 1
    record = ask(fake, kind)
    assert (record["status"], record["error"]) == (status, error)
    assert message in record["message"]
    assert record["ended"] >= record["sent"]
    assert record["retry_after"] == ("3" if kind == "busy" else None)


def test_a_deadline(fake):
    record = ask(fake, "silent", timeout=SLOW)
    assert (record["status"], record["error"]) == (200, "timeout")
    assert record["ended"] >= SLOW


def test_the_key_goes_into_its_header_only(fake):
    ask(fake, "normal", key="sekrit")
    assert "Authorization: Bearer sekrit" in fake.headers[-1]
    ask(fake, "normal")
    assert "Authorization" not in fake.headers[-1]


def test_what_servers_tell(fake):
    async def main(url):
        async with Client.open(LoadSettings(url=url)) as client:
            side = Side(name="x", url=url, model="m")
            return await client.model_of(url, None), await client.server_facts(side)

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


STREAM = (
    'data: {"a": "ü€𝄞"}\r\n\r\n: a comment\n\nevent: x\ndata: one\ndata:two\n\ndata: [DONE]\n\n'
)
EVENTS = ['{"a": "ü€𝄞"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_packets(size):
    data, stream = STREAM.encode(), EventStream()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert [event for piece in pieces for event in stream.feed(piece)] == EVENTS


def read(*chunks):
    trace = RequestTrace(scheduled=0.0)
    for at, chunk in enumerate(chunks, start=1):
        trace.take_event(chunk if isinstance(chunk, str) else json.dumps(chunk), float(at))
    trace.end_stream(99.0)
    return trace


def chunk(text="", *, index=0, finish=None, **others):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return {"choices": [choice], **others}


def test_only_chunks_with_text_or_tokens_are_timed():
    found = read(chunk(""), chunk("a"), chunk("b", finish="stop"), "[DONE]")
    assert found.chunk_times == [2.0, 3.0]
    assert (found.ended, found.error, found.finish_reason) == (4.0, None, "stop")
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    assert read(thought, chunk("a", finish="stop")).chunk_times == [1.0, 2.0]
    # Half a character is no text yet, but a token.
    blocks = [chunk("", domino={"tokens": [1]}), chunk("ü", finish="stop", domino={"tokens": [2]})]
    assert read(*blocks).chunk_tokens == [1, 1]


def test_a_count_at_the_end_is_not_the_last_chunks():
    found = read(chunk("a"), chunk("b", finish="stop", usage={"completion_tokens": 9}))
    assert found.chunk_tokens == [None, None]
    assert found.to_record(0.0)["tokens"] == 9
    assert found.to_record(0.0)["chunk_tokens"] is None


def test_every_choice_must_finish():
    both = [chunk("a"), chunk("b", index=1), chunk(finish="stop")]
    assert read(*both).error == "broken stream"
    assert read(*both, chunk(index=1, finish="length")).error is None
    assert read().error == "broken stream"


@pytest.mark.parametrize("event", ["{", "3", '"error"', "[]", "{}", '{"choices": 1}',
                                   '{"choices": [{"delta": {"content": 1}}]}'])  # fmt: skip
def test_what_is_no_chunk_is_malformed(event):
    found = read(chunk("a"), event, chunk(finish="stop"))
    assert found.error == "malformed"
    assert event in found.message
