"""Runs the server: binds, says where, and ends its answers before it ends itself."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from domino_spec.api import DominoDecoder
from domino_spec.serving.http.app import make_app
from domino_spec.serving.http.metrics import PrometheusMeter
from domino_spec.serving.listening import take_address, why_not
from domino_spec.serving.service import Service
from domino_spec.serving.settings import ServerSettings

_GRACE = 5
"""Seconds for the last bytes to reach their readers once every answer has ended."""


class Server(uvicorn.Server):
    """Uvicorn's, which lets the service drain when it is told to stop."""

    def __init__(
        self, service: Service, meter: PrometheusMeter, said: Callable[[str], None]
    ) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                make_app(service, meter=meter),
                host=settings.host,
                port=settings.port,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE,
            )
        )
        self.service = service
        self._said = said
        self._draining = False

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind, then say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._said(f"listening on {self.address}")
            if self.service.settings.page:
                self._said(f"chat page: {self.address}/")

    @property
    def address(self) -> str:
        """Where it listens, with the port it was given if it asked for any."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second ends at once; neither is an error."""
        if not self._draining:
            self._draining = True
            self._said("stopping: running answers may end, nothing new is taken")
            self.service.drain()
        else:
            self.service.drain(0)
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Until the last answer has ended, who asks is told that the server is going down."""
        if self._draining and self.service.ended:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    decoder: DominoDecoder,
    settings: ServerSettings,
    *,
    sockets: Sequence[socket.socket] | None = None,
    draft_name: str | None = None,
    said: Callable[[str], None] = print,
) -> int:
    """Serve until a signal comes; the exit code. `sockets` are those of `take_address`."""
    logging.getLogger("domino_spec.serving").setLevel(logging.INFO)
    held = list(take_address(settings) if sockets is None else sockets)
    try:
        meter = PrometheusMeter()
        service = Service(decoder, settings, draft_name=draft_name, meter=meter, said=said)
        server = Server(service, meter, said)
        gc.collect()
        gc.freeze()  # the models' many objects stay: looking through them would hold requests up
        try:
            server.run(held)
        except OSError as error:
            if server.started:
                raise
            # Another program began to listen meanwhile.
            raise why_not(settings, error) from error
    finally:
        for each in held:
            each.close()
    return 0 if server.started and service.state != "failed" else 1
