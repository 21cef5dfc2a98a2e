"""A load as a command line asks for it: from addresses and options to records and figures."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.bench.tasks import read_tasks
from domino_spec.errors import InputError
from domino_spec.load.bodies import body_of, layered, prompts_of
from domino_spec.load.client import Client, facts_of, model_of
from domino_spec.load.exchange import Exchange
from domino_spec.load.runner import Runner, Watcher
from domino_spec.load.settings import Cell, Settings, Side, base_url, same_origin
from domino_spec.load.summary import RunSummary, summarise
from domino_spec.records import append_record, environment

CONCURRENCIES = (1, 8)
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Against:
    """What the first side is held against: another address, another body, or both."""

    url: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    name: str = "against"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    """For another address; the same one takes the first side's."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Everything `domino bench serve` can be told."""

    url: str
    settings: Settings = field(default_factory=Settings)
    concurrency: tuple[int, ...] = ()
    rate: tuple[float, ...] = ()
    """With neither, `CONCURRENCIES`."""
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    system: str | None = None
    name: str = "measured"
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    against: Against | None = None
    out: Path | None = None
    """Unset: a file of this folder, named after the model and the run."""

    def cells(self) -> list[Cell]:
        """The loads, closed loops first."""
        cells = [Cell(concurrency=c) for c in self.concurrency]
        cells += [Cell(rate=rate) for rate in self.rate]
        cells = cells or [Cell(concurrency=c) for c in CONCURRENCIES]
        for cell in cells:
            self.settings.check(cell)
            if cells.count(cell) > 1:
                raise InputError(f"the load {cell} is given twice; expected each once.")
        return cells


def run_load(request: LoadRequest, watcher: Watcher | None = None) -> tuple[RunSummary, Path, bool]:
    """Measure; the figures, the file of records, and whether it ran to its end."""
    return asyncio.run(measure(request, watcher or Watcher()))


async def measure(request: LoadRequest, watcher: Watcher) -> tuple[RunSummary, Path, bool]:
    """The same inside an event loop."""
    settings, cells = request.settings, request.cells()
    tasks = read_tasks(
        request.prompts, limit=request.limit, system=request.system, notice=watcher.say
    )
    prompts = prompts_of(tasks, settings.endpoint)
    run = uuid.uuid4().hex[:8]
    kept: list[dict[str, Any]] = []
    async with Client(settings) as client:
        sides = await _sides(client, request)
        path = request.out or Path(f"load-{_word(sides[0].model)}-{run}.jsonl")

        def keep(record: dict[str, Any]) -> None:
            kept.append({"run": run, **record})
            append_record(path, kept[-1])

        async def ask(side: Side, number: int, exchange: Exchange) -> None:
            body = body_of(side, prompts[number % len(prompts)], settings, number=number)
            await client.ask(side, body, exchange)

        keep({
            "kind": "run",
            "format": FORMAT,
            "settings": settings.to_dict(),
            "prompts": len(prompts),
            "tasks": [task.name for task in tasks],
            "sides": [
                {"name": side.name, "url": side.url, "model": side.model, "body": dict(side.body),
                 "server": await facts_of(client, side)}
                for side in sides
            ],
            "environment": environment(secrets=[s.api_key for s in sides if s.api_key]),
        })  # fmt: skip
        whole = await Runner(sides, settings, ask, keep, watcher).run(cells)
    return summarise(kept)[0], path, whole


async def _sides(client: Client, request: LoadRequest) -> list[Side]:
    url = base_url(request.url)
    model = request.model or await model_of(client, url, request.api_key)
    first = Side(
        name=request.name, url=url, model=model, body=request.body, api_key=request.api_key
    )
    against = request.against
    if against is None:
        return [first]
    if against.name == first.name:
        raise InputError(f"both sides are called {first.name!r}; give one another name.")
    other = url if against.url is None else base_url(against.url)
    key = against.api_key or (request.api_key if same_origin(url, other) else None)
    named = against.model or (model if other == url else await model_of(client, other, key))
    second = Side(
        name=against.name, url=other, model=named, api_key=key,
        body=layered(request.body, against.body),
    )  # fmt: skip
    if (second.url, second.model, second.body) == (first.url, first.model, first.body):
        raise InputError(
            "both sides ask the same server for the same; expected --against to name another "
            "address, or body fields that differ."
        )
    return [first, second]


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name.rsplit("/", 1)[-1]).strip("-.") or "model"
