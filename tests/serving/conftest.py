from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from domino_spec.serving.app import make_app
from domino_spec.serving.metrics import Metrics
from tests.serving.fake import MODEL, FakeService

HELLO = [{"role": "user", "content": "hello"}]


class Client:
    """Asks an application in this process."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.metrics = Metrics()
        self.app = make_app(service, metrics=self.metrics)

    def send(self, method: str, path: str, base="http://127.0.0.1:8000", **how) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url=base) as client:
                return await client.request(method, path, **how)

        return asyncio.run(ask())

    def get(self, path: str, **how) -> httpx.Response:
        return self.send("GET", path, **how)

    def chat(self, **body) -> httpx.Response:
        body = {"model": MODEL, "messages": HELLO, **body}
        return self.send("POST", "/v1/chat/completions", json=body)

    def complete(self, **body) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 100, **body}
        return self.send("POST", "/v1/completions", json=body)

    def raw(self, content: bytes, *, kind: str = "application/json") -> httpx.Response:
        headers = {"content-type": kind}
        return self.send("POST", "/v1/chat/completions", content=content, headers=headers)


@pytest.fixture
def make_client():
    return lambda **how: Client(FakeService(**how))


@pytest.fixture
def client(make_client) -> Client:
    return make_client()


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream; its last line is checked here."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, in OpenAI's shape and no other."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"].startswith("req_")
    return body["error"]
