"""How long a one-token chat takes while a server is given prompts that are expensive to tokenise.

    python -m benchmarks.serving_attack TARGET --out records/serving-attack.jsonl

Starts `domino serve TARGET` on a free port and sends one-token chats while attackers send chats of
special-token text: several at once, then one of almost the largest body. One record a scenario.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from domino_spec.records import append_record, environment

Found = dict[str, Any]
MODEL = "served"
NAME = "<|im_end|>"
PATIENCE = 600.0
PERIOD = 5.0
"""Seconds between two prompts of an attacker, or as long as its response takes."""
SCENARIOS = {"idle": (0, 0), "many": (12, 199_000), "large": (1, 3_900_000)}
"""Attackers, and characters of each prompt."""


def chat(content: str, **more: object) -> dict[str, Any]:
    """A greedy chat."""
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **more}


async def timed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the whole response, and its status."""
    start = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    return time.perf_counter() - start, response.status_code


async def run(address: str, *, attackers: int, size: int, seconds: float) -> Found:
    """One-token chats, one after the other, while each attacker sends its prompt every few seconds.

    Attackers go on until the time is over; those that are not answered by then are waited for.
    """
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
        attack = chat(NAME * (size // len(NAME)), max_tokens=1)
        end = time.perf_counter() + seconds
        answered: list[tuple[float, int]] = []

        async def repeat() -> None:
            while not answered or time.perf_counter() < end:
                answered.append(await timed(client, attack))
                await asyncio.sleep(PERIOD - answered[-1][0])

        attacking = [asyncio.ensure_future(repeat()) for _ in range(attackers)]
        await asyncio.sleep(0.05)  # they are sent first
        spent: list[float] = []
        while time.perf_counter() < end or not all(each.done() for each in attacking):
            one, status = await timed(client, chat("Hello!", max_tokens=1))
            assert status == 200, f"the one-token chat was answered {status}"
            spent.append(one)
        await asyncio.gather(*attacking)
    return {
        "one_token_seconds": _summary(spent),
        "attack_seconds": _summary([one for one, _ in answered]),
        "attack_statuses": dict(Counter(str(status) for _, status in answered)),
    }


def _summary(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    most, median = max(seconds), statistics.median(seconds)
    return {"most": round(most, 4), "median": round(median, 4), "count": len(seconds)}


@contextmanager
def served(target: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`domino serve` on a free port: its address and its process."""
    command = [
        sys.executable, "-m", "domino_spec", "serve", target, "--port", "0", "--model-name", MODEL,
        *options,
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        yield (
            next(line.split()[-1] for line in server.stderr if "listening on" in line),
            server,
        )
    finally:
        server.terminate()
        server.communicate()


def main() -> None:
    """Serve, attack, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20, help="of each scenario")
    args = parser.parse_args()
    with served(args.target, "--no-page") as (address, _):
        for name, (attackers, size) in SCENARIOS.items():
            found = {"scenario": name, "attackers": attackers, "characters": size}
            found |= asyncio.run(run(address, attackers=attackers, size=size, seconds=args.seconds))
            print(json.dumps(found), flush=True)
            append_record(args.out, {**found, "environment": environment()})


if __name__ == "__main__":
    main()
