"""Runs the load: warm-up, then rounds in which the sides take turns."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from domino_spec.load.exchange import INTERRUPTED, Exchange
from domino_spec.load.settings import Cell, Settings, Side

Ask = Callable[[Side, int, Exchange], Awaitable[None]]
"""Sends request `number` of a side and fills the exchange."""
Keep = Callable[[dict[str, Any]], None]


class Watcher:
    """Hears how far a run is; the default says nothing."""

    def say(self, message: str) -> None:
        """Something worth knowing."""

    def progress(self, cell: Cell, side: Side, done: int, total: int | None) -> None:
        """After each request; `total` is over all rounds, None where time decides."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one side answers in one go."""

    cell: Cell
    side: Side
    number: int
    first: int
    """Number of its first request; warm-up's are below 0."""
    requests: int | None
    seconds: float | None
    warm_up: bool = False


def arrivals(
    rate: float, *, seed: int, requests: int | None, seconds: float | None
) -> Iterator[float]:
    """When requests come, in seconds from the start: a Poisson process, the same for a seed."""
    rng, at = random.Random(seed), 0.0
    for _ in itertools.count() if requests is None else range(requests):
        at += rng.expovariate(rate)
        if seconds is not None and at > seconds:
            return
        yield at


class Runner:
    """Measures every load on every side; records are kept as each round ends."""

    def __init__(
        self,
        sides: Sequence[Side],
        settings: Settings,
        ask: Ask,
        keep: Keep,
        watcher: Watcher | None = None,
    ) -> None:
        self._sides, self._settings = tuple(sides), settings
        self._ask, self._keep = ask, keep
        self._watcher = watcher or Watcher()
        self._done: dict[tuple[Cell, str], int] = {}

    async def run(self, cells: Sequence[Cell]) -> bool:
        """All loads; False if it was cancelled on the way (what there is has been kept)."""
        try:
            for cell in cells:
                await self._cell(cell)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return False
        return True

    async def _cell(self, cell: Cell) -> None:
        requests, seconds = self._settings.amount(cell)
        warm_up = self._settings.warm_up_of(cell)
        if warm_up:
            # Not at an open loop's rate: warming up is not measured, only done.
            at_once = Cell(concurrency=min(cell.concurrency or 1, warm_up))
            for side in self._sides:
                await self._round(
                    Round(cell=at_once, side=side, number=-1, first=-1, requests=warm_up,
                          seconds=None, warm_up=True),
                    cell,
                )  # fmt: skip
        first = 0
        for number in range(self._settings.rounds):
            # Who starts changes from round to round: what drifts hits both.
            order = self._sides if number % 2 == 0 else self._sides[::-1]
            started = 0
            for side in order:
                plan = Round(cell=cell, side=side, number=number, first=first,
                             requests=requests, seconds=seconds)  # fmt: skip
                started = max(started, await self._round(plan, cell))
            first += requests or started

    async def _round(self, plan: Round, cell: Cell) -> int:
        """How many requests were sent."""
        loop = asyncio.get_running_loop()
        started: list[Exchange] = []
        start, processor = loop.time(), time.process_time()
        complete = False
        run = self._open_loop if plan.cell.rate is not None else self._closed_loop
        try:
            await run(plan, started, start)
            complete = True
        finally:
            seconds = loop.time() - start
            busy = (time.process_time() - processor) / seconds if seconds > 0 else 0.0
            common = {
                **cell.to_dict(),
                "side": plan.side.name,
                "round": plan.number,
                "warm_up": plan.warm_up,
            }
            for index, exchange in enumerate(started):
                record = {"kind": "request", **common, "index": index, **exchange.to_record(start)}
                self._keep(record)
            self._keep({"kind": "round", **common, "requests": len(started),
                        "seconds": round(seconds, 6), "complete": complete,
                        "client_busy": round(busy, 4)})  # fmt: skip
        return len(started)

    async def _closed_loop(self, plan: Round, started: list[Exchange], start: float) -> None:
        """So many at once: each place asks again as soon as it is answered."""
        loop = asyncio.get_running_loop()

        async def place() -> None:
            while plan.requests is None or len(started) < plan.requests:
                now = loop.time()
                if plan.seconds is not None and now - start >= plan.seconds:
                    return
                await self._one(plan, started, Exchange(scheduled=now))

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.cell.concurrency or 1):
                group.create_task(place())

    async def _open_loop(self, plan: Round, started: list[Exchange], start: float) -> None:
        """So many a second, whether or not earlier ones are answered."""
        loop = asyncio.get_running_loop()
        due = arrivals(
            plan.cell.rate or 0.0,
            seed=self._settings.seed + plan.number,
            requests=plan.requests,
            seconds=plan.seconds,
        )
        async with asyncio.TaskGroup() as group:
            for offset in due:
                await asyncio.sleep(max(start + offset - loop.time(), 0.0))
                group.create_task(self._one(plan, started, Exchange(scheduled=start + offset)))

    async def _one(self, plan: Round, started: list[Exchange], exchange: Exchange) -> None:
        index = len(started)
        started.append(exchange)
        # Warm-up counts down, to the last prompts: the first would be in the server's cache.
        number = plan.first - index if plan.warm_up else plan.first + index
        try:
            await self._ask(plan.side, number, exchange)
        except asyncio.CancelledError:
            # A broken stream is the server's; this one is ours.
            exchange.error, exchange.message = INTERRUPTED, None
            raise
        finally:
            if exchange.ended is None:
                exchange.ended = asyncio.get_running_loop().time()
        if not plan.warm_up:
            self._tell(plan)

    def _tell(self, plan: Round) -> None:
        key = (plan.cell, plan.side.name)
        self._done[key] = self._done.get(key, 0) + 1
        total = None if plan.requests is None else plan.requests * self._settings.rounds
        self._watcher.progress(plan.cell, plan.side, self._done[key], total)
