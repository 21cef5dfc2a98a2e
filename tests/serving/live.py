"""A real server on a free port, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from domino_spec.api import DominoDecoder
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.engine_setup import local_service
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.server import Server
from tests.serving.remote import connected
from tests.support.families import make_target, random_drafter
from tests.support.tokens import small_tokenizer


def tiny_decoder(*, drafter: bool = True, engine: str = "auto") -> DominoDecoder:
    """A tiny random pair with a real tokenizer."""
    return DominoDecoder(
        make_target("llama"), random_drafter() if drafter else None, small_tokenizer(),
        depth=3 if drafter else None, engine=engine,
    )  # fmt: skip


@contextmanager
def live(
    decoder: DominoDecoder | None = None, log=lambda _: None, *, remote=False, **settings
) -> Iterator[Server]:
    """Serve until the block ends; `.address` says where. `remote` puts a pipe before the engine."""
    config = ServerConfig(**{"model": "tiny", "port": 0, "context": 128, **settings})
    metrics, decoder = Metrics(), decoder or tiny_decoder()
    with ExitStack() as stack:
        if remote:
            service, _ = stack.enter_context(connected(decoder, config, metrics=metrics))
        else:
            service = local_service(decoder, config, metrics=metrics)
        server = Server(service, metrics, log)
        up = threading.Event()

        async def startup(sockets=None, begin=server.startup):
            await begin(sockets)
            up.set()

        server.startup = startup
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert up.wait(60)
            yield server
        finally:
            service.drain(0)
            server.should_exit = True
            thread.join()
