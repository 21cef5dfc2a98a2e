"""What a caller holds while its answers are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType

from domino_spec.serving.asks import Block, Event
from domino_spec.serving.jobs import Job


class Ticket:
    """The events of a request's answers, in the order in which they happen.

    Iterate in the event loop it was made in. Events wait here for a slow reader; there are never
    more than the answers have tokens.
    """

    def __init__(self, count: int, cancel: Callable[[Sequence[Job]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()  # None: cancelled
        self._open = count
        self._cancel = cancel
        self.jobs: list[Job] = []

    def deliver(self, event: Event) -> None:
        """From any thread; a loop that is gone hears nothing."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            return

    def cancel(self) -> None:
        """Nobody will listen any more: slots are freed before the next cycle.

        Who waits for an event at that moment hears that there are no more.
        """
        if self._open:
            self._open = 0
            self._events.put_nowait(None)
            self._cancel(self.jobs)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Event:
        if not self._open:
            raise StopAsyncIteration
        event = await self._events.get()
        if event is None or not self._open:  # cancelled meanwhile
            raise StopAsyncIteration
        if not isinstance(event, Block):
            self._open -= 1
        return event

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
