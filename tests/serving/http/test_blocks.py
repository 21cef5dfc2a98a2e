"""The extension: what a block was made of."""

import pytest

from tests.serving.http.conftest import error_of, events


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


def test_choices_have_blocks_of_their_own(client):
    blocks = blocks_of(events(client.chat(stream=True, n=2, domino={"blocks": True})))
    assert {block["choice"] for block in blocks} == {0, 1}


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


def test_no_blocks_unless_they_are_asked_for(client):
    chunks = events(client.chat(stream=True, domino={"speculate": True}))
    assert not blocks_of(chunks)
    assert client.service.sequences[0].params.logprobs is None


def test_blocks_are_for_streams(client):
    error = error_of(client.chat(domino={"blocks": True}))
    assert error["param"] == "domino.blocks"
    assert "stream" in error["message"]
