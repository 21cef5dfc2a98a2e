"""Grammars of requests: compiled off the event loop, in a sandbox first."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

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
        self._lock = threading.Lock()

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; at once where it is known."""
        if (found := self._compiler.known(grammar)) is not None:
            return found
        return await asyncio.wrap_future(self.start(grammar))

    def start(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile it, after those that wait."""
        if self._waiting >= _MAX_WAITING:
            raise QueueFullError(
                f"{self._waiting} grammars are waiting to be compiled; come back later.",
                retry_after=COMPILE_TIMEOUT,
            )
        self._change_waiting(1)
        compiling = self._thread.submit(self._compile, grammar)
        compiling.add_done_callback(lambda _: self._change_waiting(-1))
        return compiling

    def _change_waiting(self, by: int) -> None:
        with self._lock:
            self._waiting += by

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if (found := self._compiler.known(grammar)) is None:
            self._sandbox.check(grammar)
            found = self._compiler.compile(grammar)
        return found

    def close(self) -> None:
        """End the sandbox."""
        self._thread.shutdown(cancel_futures=True)
        self._sandbox.close()
