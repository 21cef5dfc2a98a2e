"""Streams, however they are cut, and what their chunks say."""

import json

import pytest

from domino_spec.load.answers import StreamReader
from domino_spec.load.exchange import Exchange
from domino_spec.load.sse import EventStream

STREAM = (
    'data: {"a": "ü€𝄞"}\r\n\r\n: a comment\n\nevent: x\ndata: one\ndata:two\n\ndata: [DONE]\n\n'
)
EVENTS = ['{"a": "ü€𝄞"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_packets(size):
    data, stream = STREAM.encode(), EventStream()
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    assert [event for piece in pieces for event in stream.feed(piece)] == EVENTS


def test_an_event_without_its_end_is_none():
    stream = EventStream()
    assert list(stream.feed(b"data: half")) == []
    assert list(stream.feed(b" and half\n")) == []
    assert list(stream.feed(b"\n")) == ["half and half"]


def read(*chunks, close=True):
    exchange = Exchange(scheduled=0.0)
    reader = StreamReader(exchange)
    for at, chunk in enumerate(chunks, start=1):
        reader.take(chunk if isinstance(chunk, str) else json.dumps(chunk), float(at))
    if close:
        reader.close(99.0)
    return exchange


def chunk(text="", *, index=0, finish=None, **others):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return {"choices": [choice], **others}


def test_only_chunks_with_text_or_tokens_are_timed():
    found = read(chunk(""), chunk("a"), chunk("b", finish="stop"), "[DONE]")
    assert found.chunk_times == [2.0, 3.0]
    assert (found.ended, found.error, found.finish_reason) == (4.0, None, "stop")
    # Half a character is no text yet, but a token.
    blocks = [chunk("", domino={"tokens": [1]}), chunk("ü", finish="stop", domino={"tokens": [2]})]
    assert read(*blocks).chunk_tokens == [1, 1]


def test_counts_that_go_on_tell_each_chunks_tokens():
    usage = [{"completion_tokens": n} for n in (0, 1, 4, 4)]
    texts = ["", "a", "bcd", ""]
    chunks = [chunk(t, usage=u) for t, u in zip(texts, usage, strict=True)]
    found = read(*chunks, chunk(finish="stop", usage=usage[-1]))
    assert found.chunk_tokens == [1, 3]


def test_a_count_at_the_end_is_not_the_last_chunks():
    found = read(chunk("a"), chunk("b", finish="stop", usage={"completion_tokens": 9}))
    assert found.chunk_tokens == [None, None]
    assert found.to_record(0.0)["tokens"] == 9
    assert found.to_record(0.0)["chunk_tokens"] is None


def test_log_probabilities_tell_tokens_of_both_endpoints():
    chat = chunk("ab", finish="stop")
    chat["choices"][0]["logprobs"] = {"content": [{}, {}]}
    assert read(chat).chunk_tokens == [2]
    scores = {"tokens": ["a", "b", "c"]}
    text = {"choices": [{"index": 0, "text": "abc", "finish_reason": "stop", "logprobs": scores}]}
    assert read(text).chunk_tokens == [3]


def test_every_choice_must_finish():
    both = [chunk("a"), chunk("b", index=1), chunk(finish="stop")]
    assert read(*both).error == "broken stream"
    assert read(*both, chunk(index=1, finish="length")).error is None
    assert read().error == "broken stream"


def test_thinking_is_text_too():
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    assert read(thought, chunk("a", finish="stop")).chunk_times == [1.0, 2.0]


@pytest.mark.parametrize("event", ["{", "3", '"error"', "[]", "{}", '{"choices": 1}',
                                   '{"choices": [{"delta": {"content": 1}}]}'])  # fmt: skip
def test_what_is_no_chunk_is_malformed(event):
    found = read(chunk("a"), event, chunk(finish="stop"))
    assert found.error == "malformed"
    assert event in found.message


def test_what_went_wrong_first_counts():
    found = read(chunk("a"), {"error": {"message": "out of luck"}}, "{", "[DONE]")
    assert (found.error, found.message) == ("error in stream", "out of luck")
