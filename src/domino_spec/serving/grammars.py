"""Grammars of requests: compiled off the event loop, in a sandbox first."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from domino_spec.grammars import CompiledGrammar, Grammar, GrammarCompiler
from domino_spec.grammars.sandbox import COMPILE_TIMEOUT, GrammarSandbox
from domino_spec.serving.errors import QueueFullError

_MAX_WAITING = 64
"""Grammars that wait to be compiled, one after the other."""


class GrammarService:
    """A decoder's compiler, open to many requests at once."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._sandbox = GrammarSandbox(lambda: compiler.vocabulary)
        # Of its own: what a client left behind would hold threads that others need too.
        self._thread = ThreadPoolExecutor(1, "domino-grammars")
        self._waiting = 0

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; at once where it is known."""
        if (found := self._compiler.known(grammar)) is not None:
            return found
        if self._waiting >= _MAX_WAITING:
            raise QueueFullError(
                f"{self._waiting} grammars are waiting to be compiled; come back later.",
                retry_after=COMPILE_TIMEOUT,
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._compile, grammar)
        finally:
            self._waiting -= 1

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if (found := self._compiler.known(grammar)) is None:
            self._sandbox.check(grammar)
            found = self._compiler.compile(grammar)
        return found

    def close(self) -> None:
        """End the sandbox."""
        self._thread.shutdown(cancel_futures=True)
        self._sandbox.close()
