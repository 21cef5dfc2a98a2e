"""Runs a launch as a child: its signals, its exit code, its log without our keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from domino_spec.errors import InputError
from domino_spec.serving.backends.launch import HIDDEN, Launch

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BY_SIGNAL = 128


def run(launch: Launch) -> int:
    """Run it to its end and return its exit code, as a shell would.

    The child has a process group of its own: Ctrl-C in a terminal reaches it once, through us.
    """
    environment = {**os.environ, **launch.env, **launch.secret_env}
    with launch.arguments() as arguments, _held_signals() as held:
        try:
            child = subprocess.Popen(
                arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if launch.prints else None,
                stderr=subprocess.STDOUT if launch.prints else None,
                process_group=0,
            )
        except OSError as error:
            raise InputError(f"{arguments[0]} cannot be started ({error.strerror}).") from error
        held.give_to(child)
        if child.stdout is not None:
            _copy(child.stdout, launch.prints)
        code = child.wait()
    return code if code >= 0 else _BY_SIGNAL - code


class _Held:
    """Signals that came, for a child that may not be there yet."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []

    def take(self, number: int, _frame: FrameType | None) -> None:
        if self._child is None:
            self._waiting.append(number)
        else:
            self._child.send_signal(number)

    def give_to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        for number in self._waiting:
            child.send_signal(number)


@contextmanager
def _held_signals() -> Iterator[_Held]:
    held = _Held()
    before = {number: signal.signal(number, held.take) for number in _FORWARDED}
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy(output: IO[bytes], secrets: Sequence[str]) -> None:
    """Line by line to our own stderr."""
    hidden = [secret.encode() for secret in secrets]
    for line in output:
        for secret in hidden:
            line = line.replace(secret, HIDDEN.encode())
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
