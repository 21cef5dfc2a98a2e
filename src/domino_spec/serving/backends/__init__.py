"""One command line, several engines: a backend is a module that refuses and translates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from domino_spec.serving.backends.launch import Launch
from domino_spec.serving.backends.request import ServeRequest

if TYPE_CHECKING:
    from domino_spec.serving.backends.drafts import DraftNeeds, ServedDraft
    from domino_spec.serving.backends.installed import Engine, Installed

__all__ = ["Backend", "Launch", "ServeRequest", "find_backend"]


class Backend(Protocol):
    """What a module of another engine has."""

    NAME: str
    ENGINE: Engine
    NEEDS: DraftNeeds
    NEWEST: str

    def refuse(self, request: ServeRequest) -> None: ...

    def command(
        self,
        request: ServeRequest,
        found: Installed,
        draft: ServedDraft | None,
        environment: Mapping[str, str],
    ) -> Launch: ...

    def cautions(self, request: ServeRequest) -> list[str]: ...

    def depth(self, request: ServeRequest, draft: ServedDraft) -> int: ...


def find_backend(name: str) -> Backend:
    """The module of an engine that is another process."""
    from domino_spec.serving.backends import sglang, vllm

    found: dict[str, Backend] = {vllm.NAME: vllm, sglang.NAME: sglang}
    return found[name]
