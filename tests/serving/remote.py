"""A service whose engine is at the other end of a connection, here both in this process."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from domino_spec.serving.engine_host import EngineHost
from domino_spec.serving.engine_setup import prepare
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.remote_engine import RemoteEngine, RemoteSequence
from domino_spec.serving.service import Service


@contextmanager
def connected(
    decoder, config, *, engine=None, metrics=None
) -> Iterator[tuple[Service, EngineHost]]:
    """Both sides; `engine` decodes instead of the decoder's own."""
    ours, theirs = multiprocessing.Pipe()
    made, model = prepare(decoder, config, draft_name=None, log=lambda _: None)
    made = engine or made
    host = EngineHost(made, decoder, ours, log=lambda _: None)
    remote = RemoteEngine(
        theirs, slots=made.max_sequences, max_queue=config.max_queue, metrics=metrics or Metrics()
    )
    service = Service(
        pickle.loads(pickle.dumps(model)),
        config,
        engine=remote,
        make_sequence=RemoteSequence,
        grammars=remote,
        load_processor=remote.load_processor,
    )
    host.start()
    try:
        yield service, host
    finally:
        host.close()
        ours.close()
