"""Runs a load test: warm-up, then rounds in which the sides take turns; records as it goes."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from domino_spec.bench.tasks import read_tasks
from domino_spec.errors import InputError
from domino_spec.load.client import INTERRUPTED, Client, RequestTrace
from domino_spec.load.settings import Cell, LoadSettings, Side, merged
from domino_spec.load.summary import RunSummary, summarise
from domino_spec.records import append_record, environment

if TYPE_CHECKING:
    from domino_spec.bench.tasks import Task

FORMAT = 1

Send = Callable[[Side, int, RequestTrace], Awaitable[None]]
"""Sends a side's request of this number and fills the trace."""
Progress = Callable[[Cell, Side, int, int | None], None]
"""After each request: how many are done of how many, over all rounds; None where time decides."""


def run_load(
    settings: LoadSettings,
    *,
    notice: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> tuple[RunSummary, Path, bool]:
    """The summary, the file of records, and whether the run was complete."""
    return asyncio.run(_measure(settings, notice, progress))


async def _measure(
    settings: LoadSettings, notice: Callable[[str], None], progress: Progress
) -> tuple[RunSummary, Path, bool]:
    tasks = read_tasks(
        settings.prompts, limit=settings.limit, system=settings.system, notice=notice
    )
    prompts = _prompt_fields(tasks, settings.endpoint)
    run = uuid.uuid4().hex[:8]
    records: list[dict[str, Any]] = []
    async with Client.open(settings) as client:
        sides = await _sides(client, settings)
        path = settings.out or Path(f"load-{_file_stem(sides[0].model)}-{run}.jsonl")

        def write(record: dict[str, Any]) -> None:
            records.append({"run": run, **record})
            append_record(path, records[-1])

        async def send(side: Side, number: int, trace: RequestTrace) -> None:
            prompt = prompts[number % len(prompts)]
            await client.send(side, _request_body(side, prompt, settings, number), trace)

        write({
            "kind": "run",
            "format": FORMAT,
            "settings": settings.recorded(),
            "prompts": len(prompts),
            "tasks": [task.name for task in tasks],
            "sides": [
                {"name": side.name, "url": side.url, "model": side.model, "body": dict(side.body),
                 "server": await client.server_facts(side)}
                for side in sides
            ],
            "environment": environment(secrets=[s.api_key for s in sides if s.api_key]),
        })  # fmt: skip
        complete = await Runner(sides, settings, send, write, progress).run()
    return summarise(records)[0], path, complete


class Runner:
    """Measures every load on every side; a round is written when it ends."""

    def __init__(
        self,
        sides: Sequence[Side],
        settings: LoadSettings,
        send: Send,
        write: Callable[[dict[str, Any]], None],
        progress: Progress = lambda *_: None,
    ) -> None:
        self._sides, self._settings = tuple(sides), settings
        self._send, self._write, self._progress = send, write, progress

    async def run(self) -> bool:
        """All loads; False if it was cancelled (everything so far has been written)."""
        try:
            for cell in self._settings.cells:
                await self._run_cell(cell)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return False
        return True

    async def _run_cell(self, cell: Cell) -> None:
        warm_up = self._settings.warm_up_requests(cell)
        for side in self._sides if warm_up else ():
            await self._round(cell, side, number=-1, first=-1, requests=warm_up, warm_up=True)
        requests, seconds = self._settings.amount(cell)
        rounds = self._settings.round_count
        done = {side.name: 0 for side in self._sides}

        def count(side: Side) -> None:
            done[side.name] += 1
            total = None if requests is None else requests * rounds
            self._progress(cell, side, done[side.name], total)

        first = 0
        for number in range(rounds):
            # The side that starts alternates: drift of the machine affects both.
            order = self._sides if number % 2 == 0 else self._sides[::-1]
            started = [
                await self._round(cell, side, number=number, first=first, requests=requests,
                                  seconds=seconds, count=count)
                for side in order
            ]  # fmt: skip
            first += requests or max(started)

    async def _round(
        self,
        cell: Cell,
        side: Side,
        *,
        number: int,
        first: int,
        requests: int | None,
        seconds: float = math.inf,
        warm_up: bool = False,
        count: Callable[[Side], None] = lambda _: None,
    ) -> int:
        """One round of one side; how many requests were sent."""
        loop = asyncio.get_running_loop()
        traces: list[RequestTrace] = []
        start, processor = loop.time(), time.process_time()

        async def one(scheduled: float) -> None:
            index, trace = len(traces), RequestTrace(scheduled=scheduled)
            traces.append(trace)
            try:
                # Warm-up counts down: the first prompts must not be in the server's cache.
                await self._send(side, first - index if warm_up else first + index, trace)
            except asyncio.CancelledError:
                trace.error, trace.message = INTERRUPTED, None
                raise
            finally:
                if trace.ended is None:
                    trace.ended = loop.time()
            count(side)

        async def slot() -> None:
            """Closed loop: the next request is sent as soon as this one is answered."""
            while requests is None or len(traces) < requests:
                now = loop.time()
                if now - start >= seconds:
                    return
                await one(now)

        complete = False
        try:
            async with asyncio.TaskGroup() as group:
                if cell.rate is None or warm_up:
                    slots = cell.concurrency or 1
                    for _ in range(slots if requests is None else min(slots, requests)):
                        group.create_task(slot())
                else:
                    seed = self._settings.seed + number
                    for offset in arrivals(cell.rate, seed=seed, requests=requests,
                                           seconds=seconds):  # fmt: skip
                        await asyncio.sleep(max(start + offset - loop.time(), 0.0))
                        group.create_task(one(start + offset))
            complete = True
        finally:
            elapsed = loop.time() - start
            busy = (time.process_time() - processor) / elapsed if elapsed > 0 else 0.0
            common = {**asdict(cell), "side": side.name, "round": number, "warm_up": warm_up}
            for index, trace in enumerate(traces):
                self._write({"kind": "request", **common, "index": index,
                             **trace.to_record(start)})  # fmt: skip
            self._write({"kind": "round", **common, "requests": len(traces),
                         "seconds": round(elapsed, 6), "complete": complete,
                         "client_busy": round(busy, 4)})  # fmt: skip
        return len(traces)


def arrivals(
    rate: float, *, seed: int, requests: int | None, seconds: float = math.inf
) -> Iterator[float]:
    """Arrival times of a Poisson process in seconds from the start; the same for a seed."""
    rng, at = random.Random(seed), 0.0
    for _ in itertools.count() if requests is None else range(requests):
        at += rng.expovariate(rate)
        if at > seconds:
            return
        yield at


async def _sides(client: Client, settings: LoadSettings) -> list[Side]:
    key = settings.api_key or os.environ.get(settings.api_key_env) or None
    model = settings.model or await client.model_of(settings.url, key)
    first = Side(name=settings.name, url=settings.url, model=model, body=settings.body or {},
                 api_key=key)  # fmt: skip
    if settings.against is None:
        return [first]
    url, body = settings.against_target
    other_key = os.environ.get(settings.against_api_key_env or "") or None
    if urlsplit(url)[:2] == urlsplit(first.url)[:2]:  # a key belongs to its server
        other_key = other_key or key
    other_model = settings.against_model
    if other_model is None:
        other_model = model if url == first.url else await client.model_of(url, other_key)
    second = Side(name=settings.against_name, url=url, model=other_model,
                  body=merged(first.body, body), api_key=other_key)  # fmt: skip
    if (second.url, second.model, second.body) == (first.url, first.model, first.body):
        raise InputError(
            "both sides send the same requests to the same server; expected --against to name "
            "another URL, or body fields that differ."
        )
    return [first, second]


def _prompt_fields(tasks: Sequence[Task], endpoint: str) -> list[dict[str, Any]]:
    """The fields of each prompt; tasks alternate, so that every round has some of all."""
    by_turn = itertools.zip_longest(*(task.rows for task in tasks))
    prompts = [prompt for turn in by_turn for prompt in turn if prompt is not None]
    if endpoint == "chat":
        return [
            {"messages": [*prompt.opening(), {"role": "user", "content": prompt.turns[0]}]}
            for prompt in prompts
        ]
    if any(prompt.system is not None for prompt in prompts):
        raise InputError(
            "a system message needs the chat endpoint; remove it, or take --endpoint chat."
        )
    return [{"prompt": prompt.turns[0]} for prompt in prompts]


def _request_body(
    side: Side, prompt: dict[str, Any], settings: LoadSettings, number: int
) -> dict[str, Any]:
    common: dict[str, Any] = {
        "model": side.model,
        **prompt,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + abs(number),
        "stream": settings.stream,
    }
    if settings.stream:
        common["stream_options"] = {"include_usage": True}
    return _without_nulls(merged(common, side.body))


def _without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in body.items()
        if value is not None
    }


def _file_stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name.rsplit("/", 1)[-1]).strip("-.") or "model"
