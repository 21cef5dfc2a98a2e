"""Binding an address, and stopping in the midst of everything."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from domino_spec.errors import InputError
from domino_spec.serving import config
from domino_spec.serving.config import ServerConfig, bind_sockets
from domino_spec.serving.server import MAX_HEAD, serve
from tests.serving.live import live, tiny_decoder
from tests.support.forked import ask


def settings(**told) -> ServerConfig:
    return ServerConfig(model="m", **{"port": 0, **told})


def taken(**told):
    held = bind_sockets(settings(**told))
    for each in held:
        each.close()
    return held


def test_nobody_connects_before_the_server_listens():
    (held,) = bind_sockets(settings())
    with held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())


def test_a_taken_port():
    with live() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(InputError, match=f"another program listens on port {port} of 127"):
            taken(port=port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a b", "\ud800"])
def test_an_address_of_nobody_here(host):
    with pytest.raises(InputError, match="this machine has no address"):
        taken(host=host)


def test_a_port_of_the_system(monkeypatch):
    def refused(*_):
        raise PermissionError(13, "not you")

    monkeypatch.setattr(config.socket.socket, "bind", refused)
    with pytest.raises(InputError, match="this user may not listen on port 80"):
        taken(port=80)


def test_a_port_that_another_took_while_the_model_was_loaded():
    """Two may hold a port; the first to listen has it."""
    (ours,) = bind_sockets(settings())
    port = ours.getsockname()[1]
    with live(port=port), pytest.raises(InputError, match="another program listens"):
        serve(tiny_decoder(), settings(port=port), sockets=[ours], log=lambda _: None)


@pytest.fixture(scope="module")
def shared():
    with live() as server:
        yield server


def connect(server):
    return socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=20)


@pytest.mark.parametrize("pieces", [[b"GET / HTTP/1.1\r\nX: "], [b"GET /"], [b"A"]])
def test_a_head_without_an_end_is_refused(shared, pieces):
    """It costs its sender nothing, and comes before any key is asked for."""
    sent = 0
    with connect(shared) as client, contextlib.suppress(OSError):
        for piece in itertools.chain(pieces, itertools.repeat(b"a" * 4096)):
            client.sendall(piece)  # until the server closes
            sent += len(piece)
            if sent > 100 * MAX_HEAD:
                break
    assert sent <= 100 * MAX_HEAD


POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LENGTH, CHUNKED = b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
        POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
        POST + LENGTH + b"Content-Length: 3\r\n\r\n{} ",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
        POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
        POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"\n"),
        POST.replace(b"\r\n", b"\n") + b"Content-Length: 2\n\n{}",
        POST + b"X: a\rb\r\n" + LENGTH + b"\r\n{}",
        b"\x16\x03\x01\r\n\r\n",
        POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + LENGTH + b"\r\n{}",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
)
def test_what_is_not_one_plain_request_is_refused_and_closed(shared, caplog, request_bytes):
    with connect(shared) as client, client.makefile("rb") as answer:
        client.sendall(request_bytes + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = answer.read().partition(b"\r\n\r\n")  # until the server closes
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] in ("invalid_http", "upgrade_not_supported")
    assert not caplog.records


def test_a_long_head_and_a_longer_body_are_taken():
    with live() as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "fox " * 30_000}]}
        headers = {"X-Long": "a" * 50_000}
        for _ in range(2):
            answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, headers=headers)
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_where_the_page_is():
    said: list[str] = []
    with live(log=said.append) as server:
        assert said == [f"listening on {server.address}", f"chat page: {server.address}/"]
    said.clear()
    with live(log=said.append, page=False):
        assert len(said) == 1


# Stopping -----------------------------------------------------------------------------------------


BODY = {
    "model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "temperature": 0,
    "max_tokens": 40, "stream": True, "ignore_eos": True,
}  # fmt: skip


def told(path):
    """What the servers' process writes into a file, once it has."""
    for _ in range(6000):
        if path.exists():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path.name} was never written")


async def read(client, first):
    """All of a stream: its chunks, and whether it ended as streams end."""
    chunks = []
    async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
        if response.status_code == 503:  # it had no slot yet
            first.set()
            return [json.loads(await response.aread())], True
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return chunks, True
            if line:
                chunks.append(json.loads(line.removeprefix("data: ")))
                first.set()
    return chunks, False


async def interrupted(pid, address, streams):
    """Stop the server while it streams; then how the streams ended, its health and a refusal."""
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        firsts = [asyncio.Event() for _ in range(streams)]
        tasks = [asyncio.create_task(read(client, first)) for first in firsts]
        await asyncio.gather(*(first.wait() for first in firsts[:4]))
        os.kill(pid, signal.SIGTERM)
        health = refused = None
        with contextlib.suppress(httpx.TransportError):  # it may be gone already
            while (health := await client.get("/health")).status_code == 200:
                pass  # the signal is still on its way
            refused = await client.post("/v1/chat/completions", json=BODY)
        return await asyncio.gather(*tasks), health, refused


def test_every_stream_ends_and_so_does_the_process(tmp_path):
    """One server with time to end what it does, and after it one without."""
    with ThreadPoolExecutor(1) as thread:
        job = ("tests.serving.process", "serve_each", str(tmp_path), 60, 0)
        codes = thread.submit(ask, *job)
        pid = int(told(tmp_path / "pid"))
        try:
            patient = asyncio.run(interrupted(pid, told(tmp_path / "0"), streams=7))
            hasty = asyncio.run(interrupted(pid, told(tmp_path / "1"), streams=7))
            assert codes.result(60) == [0, 0]
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # or the thread would wait for it
            raise
    (found, health, refused), (cut, *_) = patient, hasty
    errors, finished = ends(found)
    assert not errors
    assert len(finished) == 7, "those who waited for a slot are served too"
    assert (health.status_code, health.json()) == (503, {"status": "stopping"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_stopping"
    assert int(refused.headers["retry-after"]) > 0
    errors, finished = ends(cut)
    assert len(errors) + len(finished) == 7
    assert errors
    assert all("went down" in error["message"] for error in errors)


def ends(found):
    """Errors, and streams that came to their end; each of them was closed."""
    assert all(ended for _, ended in found)
    errors = [chunk["error"] for chunks, _ in found for chunk in chunks if "error" in chunk]
    finished = [
        chunks for chunks, _ in found
        if any(c["choices"] and c["choices"][0]["finish_reason"] for c in chunks if "choices" in c)
    ]  # fmt: skip
    return errors, finished
