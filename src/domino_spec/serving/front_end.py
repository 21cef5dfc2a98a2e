"""A server of two processes: the engine's own, and a child that speaks HTTP.

Two interpreters: what HTTP, JSON and detokenising take, no step of the engine waits for.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any

from uvicorn.server import HANDLED_SIGNALS

from domino_spec.serving.config import ServerConfig, listen
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.remote_engine import RemoteEngine, RemoteSequence
from domino_spec.serving.server import GRACE_SECONDS, Server, tune_interpreter
from domino_spec.serving.service import ServedModel, Service

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder

_POLL_SECONDS = 0.2
_FAILED = 1


# The engine's process -----------------------------------------------------------------------------


def serve_in_two(
    decoder: DominoDecoder,
    config: ServerConfig,
    sockets: Sequence[socket.socket],
    *,
    draft_name: str | None,
    log: Callable[[str], None],
) -> int:
    """Decode here, speak HTTP in a child; the exit code."""
    from domino_spec.serving.engine_host import EngineHost
    from domino_spec.serving.engine_setup import prepare

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=run_front_end, args=(theirs, list(sockets), config), name="domino-http", daemon=True
    )
    with _signals(signal.SIG_IGN):  # which the child inherits: a terminal's Ctrl-C is for this one
        child.start()  # its imports take seconds, as the engine does
    theirs.close()
    try:
        engine, model = prepare(decoder, config, draft_name=draft_name, log=log)
        host = EngineHost(engine, decoder, ours, log)
        listen(sockets, config)
        ours.send_bytes(pickle.dumps((model, engine.max_sequences)))
        tune_interpreter()
        host.start()
        try:
            return _wait(child, host.stop, log)
        finally:
            host.close()
    finally:
        ours.close()  # the child ends by that, too
        child.join(GRACE_SECONDS)
        if child.exitcode is None:
            child.kill()


def _wait(child: BaseProcess, stop: Callable[[], None], log: Callable[[str], None]) -> int:
    """Until the child has ended, which it does after a signal; the exit code."""
    stops: list[float] = []

    def handle(_: int, __: FrameType | None) -> None:
        stops.append(time.monotonic())
        # A handler must not wait for what the thread that it interrupted may hold.
        threading.Thread(target=stop, daemon=True).start()

    with _signals(handle):
        while child.exitcode is None:
            child.join(_POLL_SECONDS)
            if len(stops) > 1 and time.monotonic() > stops[1] + 2 * GRACE_SECONDS:
                child.kill()
    if child.exitcode not in (0, _FAILED):
        log(f"the process of HTTP ended with {child.exitcode}; so does the server")
    return 0 if child.exitcode == 0 else _FAILED


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Signals that stop the server go there; only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, handler) for each in HANDLED_SIGNALS}
    try:
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)


# The child ----------------------------------------------------------------------------------------


class _FrontEndServer(Server):
    """The engine's process is told by signals, this one by it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of its own."""
        yield


def run_front_end(
    connection: Connection, sockets: list[socket.socket], config: ServerConfig
) -> None:
    """Speak HTTP until the engine's process stops this one, or is gone."""
    for each in HANDLED_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    try:
        model, slots = pickle.loads(connection.recv_bytes())
    except EOFError:  # it could not make its engine, and has said why
        return
    assert isinstance(model, ServedModel)
    metrics = Metrics()
    engine = RemoteEngine(connection, slots=slots, max_queue=config.max_queue, metrics=metrics)
    service = Service(
        model,
        config,
        engine=engine,
        make_sequence=RemoteSequence,
        grammars=engine,
        load_processor=engine.load_processor,
    )
    server = _FrontEndServer(service, metrics, engine.log)
    engine.on_stop = lambda: server.handle_exit(signal.SIGTERM, None)

    def exit_at_once() -> None:
        server.should_exit = True

    engine.on_lost = exit_at_once
    tune_interpreter()
    server.run(sockets)
    sys.exit(0 if server.started and engine.state != "failed" else _FAILED)
