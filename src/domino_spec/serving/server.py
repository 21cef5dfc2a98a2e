"""Runs the server: listens, says where, and drains before it ends."""

from __future__ import annotations

import gc
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from domino_spec.serving.app import make_app
from domino_spec.serving.config import ServerConfig, bind_sockets, listen
from domino_spec.serving.errors import ApiError
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.service import Service

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder

GRACE_SECONDS = 5
"""For the last bytes to reach their readers once every request has ended."""
MAX_HEAD = 65_536
"""Bytes of a request line and its headers."""
_INVALID = "Invalid HTTP request received."
"""What uvicorn says of whatever its parser refuses."""
_SWITCH_SECONDS = 0.0003
"""How long the event loop may keep the engine's thread from going on, and the other way round."""


_log = logging.getLogger("uvicorn.error.requests")
_log.setLevel(logging.ERROR)  # what clients do wrong they are told; the log is for our failures


class LimitedProtocol(HttpToolsProtocol):
    """Refuses a head that does not end: the parser would keep whatever comes, key or not."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _log
        self._head: int | None = 0
        """Bytes of a request's head so far; None in a body."""

    def on_message_begin(self) -> None:
        """A head begins."""
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """And ends."""
        self._head = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to heads; the piece in which one begins is not counted."""
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"the request's head has more than {MAX_HEAD} bytes; send less.")

    def send_400_response(self, msg: str) -> None:
        """What never reaches the application is answered in the same shape, and closed."""
        if msg == _INVALID:
            msg = "the request is not valid HTTP/1.1; check its headers and its length."
        body = ApiError(400, msg, code="invalid_http").to_json()
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """Uvicorn's, which lets the service drain when it is told to stop."""

    def __init__(self, service: Service, metrics: Metrics, log: Callable[[str], None]) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, metrics=metrics),
                host=service.config.host,
                port=service.config.port,
                http=LimitedProtocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self.service = service
        self._log = log
        self._draining = False

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Listen, then say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._log(f"listening on {self.address}")
            if self.service.config.page:
                self._log(f"chat page: {self.address}/")

    @property
    def address(self) -> str:
        """Where it listens, with the port that it was given for port 0."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second ends at once; neither is an error."""
        if not self._draining:
            self._draining = True
            self._log("stopping: running requests may end, nothing new is taken")
            self.service.drain()
        else:
            self.service.drain(0)
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Until the last request has ended, new ones are told that the server is going down."""
        if self._draining and self.service.engine.ended:
            self.should_exit = True
        return await super().on_tick(counter)


def tune_interpreter() -> None:
    """For a process that answers requests, once all is loaded."""
    gc.collect()
    gc.freeze()  # the models' many objects stay: collections would pause requests
    sys.setswitchinterval(_SWITCH_SECONDS)


def serve(
    decoder: DominoDecoder,
    config: ServerConfig,
    *,
    sockets: Sequence[socket.socket] | None = None,
    draft_name: str | None = None,
    log: Callable[[str], None] = print,
    split: bool | None = None,
) -> int:
    """Serve until a signal comes; the exit code. `sockets` are those of `bind_sockets`.

    With `split` HTTP has a process of its own; None is where the target is on a GPU, whose steps
    are too short to share an interpreter. On a CPU it would only cost memory.
    """
    from domino_spec.serving.engine_setup import local_service

    logging.getLogger("domino_spec.serving").setLevel(logging.INFO)
    if split is None:
        split = decoder.target.device.type == "cuda"
    bound = list(bind_sockets(config) if sockets is None else sockets)
    try:
        if split:
            from domino_spec.serving.front_end import serve_in_two

            return serve_in_two(decoder, config, bound, draft_name=draft_name, log=log)
        metrics = Metrics()
        service = local_service(decoder, config, draft_name=draft_name, metrics=metrics, log=log)
        server = Server(service, metrics, log)
        tune_interpreter()
        listen(bound, config)
        server.run(bound)
    finally:
        for each in bound:
            each.close()
    return 0 if server.started and service.engine.state != "failed" else 1
