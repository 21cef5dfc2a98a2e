"""An OpenAI-compatible server that answers from a script and fails when told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | None
"""A status and a body; None closes the connection."""


def says(text: str, reason: str = "stop", **message: Any) -> Reply:
    choice = {"message": {"content": text, **message}, "finish_reason": reason}
    return 200, {"choices": [choice]}


@dataclass
class FakeServer:
    """What it was asked; `respond` decides what it answers."""

    respond: Callable[[dict[str, Any], int], Reply]
    url: str = ""
    models: list[str] = field(default_factory=lambda: ["served"])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    busiest: int = 0
    _busy: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self) -> list[str]:
        """The last user message of every request."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def handle(self, body: dict[str, Any], key: str | None) -> Reply:
        """Answer one request."""
        with self._lock:
            self.bodies.append(body)
            self.keys.append(key)
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
            before = self.asked().count(body["messages"][-1]["content"]) - 1
        try:
            return self.respond(body, before)
        finally:
            with self._lock:
                self._busy -= 1


@contextmanager
def serving(respond: Callable[[dict[str, Any], int], Reply]) -> Iterator[FakeServer]:
    """Run one for a test; `respond` gets the body and how often this was asked before."""
    fake = FakeServer(respond)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models", self.path
            self._send((200, {"data": [{"id": name} for name in fake.models]}))

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions", self.path
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(fake.handle(body, self.headers.get("Authorization")))

        def _send(self, reply: Reply) -> None:
            if reply is None:
                self.close_connection = True
                return
            status, values = reply
            data = values if isinstance(values, bytes) else json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
