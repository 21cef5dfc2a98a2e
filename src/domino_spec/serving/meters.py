"""What the engine's thread tells those who count, as it happens, in that thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from domino_spec.decoding import SequenceOutput

_log = logging.getLogger("domino_spec.serving")


class Meter(Protocol):
    """A listener; `metrics.py` makes Prometheus' numbers of it."""

    def queue(self, *, waiting: int, running: int, slots: int) -> None:
        """How full it is, after every change."""

    def first_token(self, seconds: float) -> None:
        """An answer's first token came so long after it was asked for."""

    def block(self, output: SequenceOutput, *, seconds: float) -> None:
        """What a later step gave, and seconds since the sequence's last one."""

    def ended(self, reason: str, *, seconds: float) -> None:
        """An answer is over: `eos`, `stop`, `length`, `cancelled` or `failed`."""


class Silence:
    """Nobody counts."""

    def queue(self, *, waiting: int, running: int, slots: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def block(self, output: SequenceOutput, *, seconds: float) -> None: ...

    def ended(self, reason: str, *, seconds: float) -> None: ...


class Forgiven:
    """Another meter, whose failures are logged: nobody's answer may hang on being counted."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def queue(self, *, waiting: int, running: int, slots: int) -> None:
        """As the other one."""
        _tell(self._meter.queue, waiting=waiting, running=running, slots=slots)

    def first_token(self, seconds: float) -> None:
        """As the other one."""
        _tell(self._meter.first_token, seconds)

    def block(self, output: SequenceOutput, *, seconds: float) -> None:
        """As the other one."""
        _tell(self._meter.block, output, seconds=seconds)

    def ended(self, reason: str, *, seconds: float) -> None:
        """As the other one."""
        _tell(self._meter.ended, reason, seconds=seconds)


def _tell(listener: Callable[..., None], *facts: Any, **more: Any) -> None:
    try:
        listener(*facts, **more)
    except Exception:
        _log.exception("something could not be counted")
