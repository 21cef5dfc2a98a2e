"""One command line, several engines: a `Backend` refuses and translates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from domino_spec.serving.backends.args import ServeArgs

if TYPE_CHECKING:
    from domino_spec.serving.backends.backend import Backend

__all__ = ["ServeArgs", "find_backend"]


def find_backend(name: str) -> Backend:
    """An engine that is another process."""
    from domino_spec.serving.backends import sglang, vllm

    return {each.name: each for each in (vllm.BACKEND, sglang.BACKEND)}[name]
