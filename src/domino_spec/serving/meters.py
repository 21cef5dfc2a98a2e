"""What the worker tells those who count, as it happens. Called in the worker's thread."""

from __future__ import annotations

from typing import Protocol

from domino_spec.decoding import Commit


class Meter(Protocol):
    """A listener; `metrics.py` makes Prometheus' numbers of it."""

    def queue(self, *, waiting: int, running: int, slots: int) -> None:
        """How full it is, after every change."""

    def first_token(self, seconds: float) -> None:
        """An answer's first token came so long after it was asked for."""

    def block(self, commit: Commit, *, drafts: int, seconds: float) -> None:
        """A later block: drafts verified, and seconds since the answer's last one."""

    def ended(self, reason: str, *, seconds: float) -> None:
        """An answer is over: `eos`, `stop`, `length`, `cancelled` or `failed`."""


class Silence:
    """Nobody counts."""

    def queue(self, *, waiting: int, running: int, slots: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def block(self, commit: Commit, *, drafts: int, seconds: float) -> None: ...

    def ended(self, reason: str, *, seconds: float) -> None: ...
