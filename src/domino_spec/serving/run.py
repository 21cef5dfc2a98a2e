"""Runs the server: binds, says where, and ends its answers before it ends itself."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from types import FrameType

import uvicorn

from domino_spec.api import DominoDecoder
from domino_spec.errors import InputError
from domino_spec.serving.http.app import make_app
from domino_spec.serving.http.metrics import PrometheusMeter
from domino_spec.serving.service import Service
from domino_spec.serving.settings import ServerSettings

_GRACE = 5.0
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
                timeout_graceful_shutdown=int(settings.drain_seconds + _GRACE),
            )
        )
        self.service = service
        self._said = said

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Bind, then say where."""
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started:
            self._said(f"listening on {self.address}")

    @property
    def address(self) -> str:
        """Where it listens, with the port it was given if it asked for any."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second ends at once; neither is an error."""
        if not self.should_exit:
            self._said("stopping: running answers may end, nothing new is taken")
            self.service.drain()
        else:
            self.service.drain(0)
            self.force_exit = True
        self.should_exit = True


def serve(
    decoder: DominoDecoder,
    settings: ServerSettings,
    *,
    draft_name: str | None = None,
    said: Callable[[str], None] = print,
) -> int:
    """Serve until a signal comes; the exit code."""
    logging.getLogger("domino_spec.serving").setLevel(logging.INFO)
    meter = PrometheusMeter()
    service = Service(decoder, settings, draft_name=draft_name, meter=meter, said=said)
    server = Server(service, meter, said)
    gc.collect()
    gc.freeze()  # the models' many objects stay: looking through them would hold requests up
    try:
        server.run()
    except SystemExit as error:  # what Uvicorn does when it cannot bind
        raise InputError(
            f"nothing can listen on {settings.host}:{settings.port}; is the port taken? Choose "
            "another with --port."
        ) from error
    return 0 if server.started and service.state != "failed" else 1
