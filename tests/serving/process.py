"""Servers in a process of their own, slow enough to be interrupted."""

import os
import time
from pathlib import Path

from domino_spec.engine.engine import Engine
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.server import serve
from tests.serving.live import tiny_decoder


def serve_each(folder: str, *drain_seconds: float) -> list[int]:
    """One server after the other; their exit codes. Files tell the process and the addresses."""
    quick = Engine.step

    def step(engine):
        time.sleep(0.02)
        return quick(engine)

    Engine.step = step  # type: ignore[method-assign]
    _write(Path(folder, "pid"), str(os.getpid()))
    codes = []
    for number, seconds in enumerate(drain_seconds):
        settings = ServerConfig(model="tiny", port=0, slots=4, context=200, drain_seconds=seconds)
        path = Path(folder, str(number))

        def log(line: str, path: Path = path) -> None:
            if line.startswith("listening on "):
                _write(path, line.split()[-1])

        codes.append(serve(tiny_decoder(), settings, log=log))
    return codes


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a test waits for it."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)
