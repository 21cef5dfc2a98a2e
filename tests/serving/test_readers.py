"""Readers who do not read, and those who hang up: others notice nothing."""

import json
import socket
import threading

import httpx

from tests.serving.live import live

LONG = {
    "model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "temperature": 0,
    "max_tokens": 170, "stream": True, "ignore_eos": True,
}  # fmt: skip


def opened(address, body):
    """A stream whose client has a small window and has read nothing yet."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def wait_until(true):
    for _ in range(3000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never happened")


def test_a_slow_reader_stalls_nobody_and_loses_nothing():
    body = {**LONG, "n": 8, "logprobs": True, "top_logprobs": 20}  # megabytes
    with live(slots=8, context=200) as server:
        engine = server.service.engine
        slow = opened(server.address, body)
        wait_until(lambda: engine.running)
        quick = httpx.post(
            f"{server.address}/v1/chat/completions",
            json={**LONG, "stream": False, "max_tokens": 5}, timeout=60,
        )  # fmt: skip
        assert quick.status_code == 200
        wait_until(lambda: not engine.running)  # all is decoded, though nobody has read it
        received = b""
        while part := slow.recv(65536):
            received += part
        slow.close()
    assert len(received) > 2_000_000
    assert b"data: [DONE]" in received[-200:]
    assert received.count(b'"finish_reason":"length"') == 8


def test_hanging_up_frees_the_slot_at_once():
    with live(slots=1, context=200) as server:
        engine = server.service.engine
        for body in (LONG, {**LONG, "stream": False}):
            connection = opened(server.address, body)
            wait_until(lambda: engine.running)
            connection.close()
            wait_until(lambda: not engine.running)
        page = httpx.get(f"{server.address}/metrics").text
        assert 'domino_answers_ended_total{reason="cancelled"} 2.0' in page
        assert 'domino_answers_ended_total{reason="length"} 0.0' in page
