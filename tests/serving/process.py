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
    _slow_down(folder)
    return [
        _serve(folder, number, drain_seconds=seconds)
        for number, seconds in enumerate(drain_seconds)
    ]


def serve_split(folder: str) -> None:
    """Two servers of two processes each; a file tells the first one's exit code."""
    _slow_down(folder)
    code = _serve(folder, 0, split=True)
    _write(Path(folder, "code"), str(code))
    _serve(folder, 1, split=True)


def _slow_down(folder: str) -> None:
    quick = Engine.step

    def step(engine):
        time.sleep(0.02)
        return quick(engine)

    Engine.step = step  # type: ignore[method-assign]
    _write(Path(folder, "pid"), str(os.getpid()))


def _serve(folder: str, number: int, *, drain_seconds: float = 0, split: bool = False) -> int:
    settings = ServerConfig(model="tiny", port=0, slots=4, context=200, drain_seconds=drain_seconds)

    def log(line: str) -> None:
        if line.startswith("listening on "):
            _write(Path(folder, str(number)), line.split()[-1])

    return serve(tiny_decoder(), settings, log=log, split=split)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a test waits for it."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)
