"""Bodies that are no requests: never a 500."""

import asyncio
import json

import pytest

from domino_spec.serving import middleware
from domino_spec.serving.config import ServerConfig
from tests.serving.fake import MODEL
from tests.serving.http.conftest import HELLO, error_of

GOOD = json.dumps({"model": MODEL, "messages": HELLO}).encode()
DEEP = 100_000
SAID = b'{"model":"tiny","messages":[{"role":"user","content":"%s"}]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{",
        b'{"model": }',
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b'{"model":"\xff"}',
        b"[" * DEEP + b"]" * DEEP,
        b'{"model":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        GOOD[:-1] + b',"temperature":NaN}',
        GOOD[:-1] + b',"temperature":Infinity}',
        GOOD[:-1] + b',"temperature":1e999}',
        GOOD[:-1] + b',"seed":' + b"9" * 10_000 + b"}",
        GOOD[:-1] + b',"stop":"\\ud800"}',
        SAID % b"\\ud800",
        GOOD + b"{}",
        json.dumps({str(i): i for i in range(200)}).encode(),
        b'{"model":"tiny","messages":' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"model":"tiny","messages":[' + b"1," * 50_000 + b"1]}",
    ],
)  # fmt: skip
def test_no_body_is_too_odd_for_a_plain_refusal(client, body):
    response = client.raw(body)
    assert response.status_code == 400, response.text
    error_of(response)
    assert not client.service.sequences


@pytest.mark.parametrize("text", [rb"\u0000", rb"\ud83d\ude00", rb"\u202e", "→".encode(), rb"\\"])
def test_odd_text_is_text(client, text):
    assert client.raw(SAID % text).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x"])
def test_other_content_types_are_refused(client, kind):
    """What a page of another site can send without being asked never gets in."""
    response = client.raw(GOOD, kind=kind)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    response = client.send("POST", "/v1/chat/completions", content=GOOD)
    assert response.status_code == 415


@pytest.mark.parametrize(
    ("where", "param"),
    [
        (lambda many: {"metadata": many}, "metadata"),
        (lambda many: {"messages": [{**HELLO[0], **many}]}, "messages[0]"),
        (lambda many: {"domino": many}, "domino"),
    ],
)
def test_an_object_of_very_many_fields_is_one_error(client, where, param):
    error = error_of(client.chat(**where({str(number): 0 for number in range(101)})))
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "more than 100 fields" in error["message"]


def test_the_way_that_got_furthest_is_the_one_that_was_meant(client):
    assert error_of(client.complete(prompt=[1, 2, 3, "a"]))["param"] == "prompt[3]"
    assert error_of(client.complete(prompt=["a", "b", 3]))["param"] == "prompt[2]"
    assert error_of(client.complete(prompt=[[1], [2, -1]]))["param"] == "prompt[1][1]"


def test_a_charset_does_no_harm(client):
    assert client.raw(GOOD, kind="application/json; charset=utf-8").status_code == 200


def padded(size: int) -> bytes:
    body = {"model": MODEL, "messages": HELLO, "user": ""}
    short = len(json.dumps(body).encode())
    return json.dumps({**body, "user": "x" * (size - short)}).encode()


def test_bodies_end_somewhere(make_client):
    client = make_client(config=ServerConfig(model=MODEL, page=False, max_body_bytes=2048))
    assert client.raw(padded(2048)).status_code == 200
    response = client.raw(padded(2049))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


def test_a_body_that_does_not_say_its_length_ends_too(make_client):
    client = make_client(config=ServerConfig(model=MODEL, page=False, max_body_bytes=2048))
    sent = 0

    def send(body: bytes):
        async def pieces():
            nonlocal sent
            for start in range(0, len(body), 256):
                sent += 1
                yield body[start : start + 256]

        return client.send(
            "POST",
            "/v1/chat/completions",
            content=pieces(),
            headers={"content-type": "application/json"},
        )

    assert send(padded(2048)).status_code == 200
    sent = 0
    response = send(padded(100_000))
    assert response.status_code == 413
    error_of(response)
    assert sent < 12, "it was read to the end"


def sent_slowly(client, *parts: bytes) -> list[dict]:
    """Send these and nothing more, over a connection that stays open; what came back."""
    coming = list(parts)
    sent: list[dict] = []

    async def receive():
        if not coming:
            await asyncio.Event().wait()
        part = coming.pop(0)
        return {"type": "http.request", "body": part, "more_body": part != GOOD}

    async def send(message):
        sent.append(message)

    path = "/v1/chat/completions"
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"},
    }  # fmt: skip
    asyncio.run(client.app(scope, receive, send))
    return sent


@pytest.mark.parametrize("parts", [(), (b"{",), (b"{", b'"mod')])
def test_a_body_that_never_ends_is_not_waited_for(client, monkeypatch, parts):
    monkeypatch.setattr(middleware, "UPLOAD_SECONDS", 0)
    start, body = sent_slowly(client, *parts)
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"
    assert not client.service.sequences


def test_an_answer_may_take_longer_than_its_body(client, monkeypatch):
    monkeypatch.setattr(middleware, "UPLOAD_SECONDS", 0)
    start, _ = sent_slowly(client, GOOD)
    assert start["status"] == 200
