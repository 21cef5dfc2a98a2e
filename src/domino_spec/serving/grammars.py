"""Grammars of requests: compiled off the event loop, once they were tried out elsewhere."""

from __future__ import annotations

import asyncio

from domino_spec.grammars import CompiledGrammar, Grammar, GrammarCompiler
from domino_spec.grammars.trial import TRIAL_SECONDS, Trials
from domino_spec.serving.errors import QueueFullError

_MOST_WAITING = 64
"""Grammars that wait to be compiled, one after the other."""


class GrammarService:
    """A decoder's compiler, open to many requests at once."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._trials = Trials(lambda: compiler.vocabulary)
        self._turn = asyncio.Semaphore(1)  # or each would hold a thread that prompts need too
        self._waiting = 0

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; at once where it is known."""
        if (found := self._compiler.known(grammar)) is not None:
            return found
        if self._waiting >= _MOST_WAITING:
            raise QueueFullError(
                f"{self._waiting} grammars are waiting to be compiled; come back later.",
                retry_after=TRIAL_SECONDS,
            )
        self._waiting += 1
        try:
            async with self._turn:
                if (found := self._compiler.known(grammar)) is None:
                    await asyncio.to_thread(self._trials.check, grammar)
                    found = await asyncio.to_thread(self._compiler.compile, grammar)
                return found
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the process in which grammars are tried out."""
        self._trials.close()
