"""A client that hangs up frees its slots, whatever its request was waiting for."""

import asyncio
import json

import pytest

from tests.serving.fake import MODEL
from tests.serving.http.conftest import HELLO


async def hang_up(client, *, stream: bool, after: int = 0, held_at: int = 1) -> list[dict]:
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
    if not after:
        while not (client.service.streams and client.service.streams[0].position == held_at):
            await asyncio.sleep(0)
        waiting.set()
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
