"""One command line, several engines: a backend is a module that refuses and translates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from domino_spec.serving.backends.args import ServeArgs

if TYPE_CHECKING:
    from domino_spec.serving.backends.launch import Backend

__all__ = ["ServeArgs", "find_backend"]


def find_backend(name: str) -> Backend:
    """The module of an engine that is another process."""
    from domino_spec.serving.backends import sglang, vllm

    found: dict[str, Backend] = {vllm.NAME: vllm, sglang.NAME: sglang}
    return found[name]
