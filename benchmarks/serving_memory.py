"""What a server on a CPU holds in memory, beside the bytes of its weights and caches.

    python -m benchmarks.serving_memory TARGET [--draft DRAFT] --out records/serving-memory.jsonl

The cache of conversions should not be in use by another process: shared pages count there too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving_attack import chat, served, timed
from domino_spec.api import DominoDecoder
from domino_spec.engine.sizes import token_bytes
from domino_spec.records import append_record, environment

MIB = 2**20


def resident(process: int) -> dict[str, float]:
    """MiB now and at most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if " kB" in line}
    return {"now": found["VmRSS"], "most": found["VmHWM"]}


async def ask(address: str, count: int) -> dict[str, Any]:
    """Some chats together; then what the server says of itself."""
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        bodies = [
            chat(f"{number} " + "Tell me of a fox. " * 50, max_tokens=16) for number in range(count)
        ]
        for _, status in await asyncio.gather(*(timed(client, body) for body in bodies)):
            assert status == 200
        info: dict[str, Any] = (await client.get("/v1/domino")).json()
        return info


def main() -> None:
    """Serve, ask, compare with what has to be there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = ["--dtype", "float32"]  # a GGUF file's too, as `from_pretrained` loads it
    options += [] if args.draft is None else ["--draft", args.draft]
    with served(args.target, *options) as (address, server):
        idle = resident(server.pid)
        info = asyncio.run(ask(address, 12))
        busy = resident(server.pid)
    decoder = DominoDecoder.from_pretrained(args.target, args.draft)
    models = [decoder.target.model]
    if decoder.drafter is not None and decoder.drafter.model is not None:
        models.append(decoder.drafter.model)
    weights = {each.data_ptr(): each.nbytes for model in models for each in model.parameters()}
    # One slot more than sequences run: it is for what fills up a batch.
    tokens = (info["slots"] + 1) * info["context"]
    needed = (sum(weights.values()) + tokens * token_bytes(decoder.target, decoder.drafter)) / MIB
    found = {
        "draft": args.draft, "slots": info["slots"], "context": info["context"],
        "weights_and_caches_mib": round(needed), "idle_mib": round(idle["now"]),
        "busy_mib": round(busy["now"]), "most_mib": round(busy["most"]),
        "ratio": round(busy["now"] / needed, 3),
    }  # fmt: skip
    print(json.dumps(found))
    append_record(args.out, {**found, "environment": environment()})


if __name__ == "__main__":
    main()
