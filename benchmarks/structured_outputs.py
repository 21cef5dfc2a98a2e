"""JSON-schema requests to a running server: are answers valid, and the same without drafts?

    domino serve SmolLM2-135M-Instruct.Q4_1.gguf --draft released:smollm2-135m-instruct-cpu \
        --model-name smollm2 --dtype float32 --depth 4 --slots 16 --port 8123
    python -m benchmarks.structured_outputs --url http://127.0.0.1:8123 --model smollm2

Each request is sent with drafts and without (`"domino": {"speculate": false}`), greedily. Every
answer that ends by itself must be valid by its schema (the jsonschema package), and the texts of
the two must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

from domino_spec.records import append_record, environment


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD = {"type": "string", "minLength": 1, "maxLength": 24}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": _object(
        name=_WORD,
        age={"type": "integer", "minimum": 0, "maximum": 120},
        city=_WORD,
        married={"type": "boolean"},
    ),
    "recipe": _object(
        dish=_WORD,
        ingredients={"type": "array", "items": _WORD, "minItems": 1, "maxItems": 3},
        minutes={"type": "integer", "minimum": 1, "maximum": 300},
        difficulty={"enum": ["easy", "medium", "hard"]},
    ),
    "order": _object(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        items={
            "type": "array",
            "items": _object(product=_WORD, count={"type": "integer", "minimum": 1}),
            "minItems": 1,
            "maxItems": 2,
        },
        total={"type": "number", "minimum": 0},
    ),
    "date": _object(
        event=_WORD,
        day={"type": "string", "format": "date"},
        place={"anyOf": [_WORD, {"type": "null"}]},
    ),
}
SUBJECTS = (
    "a baker", "Ada Lovelace", "a trip to Rome", "lentil soup", "a birthday", "an astronaut",
    "a violin", "the harbour", "a chess game", "apple pie", "a library", "a bicycle",
)  # fmt: skip


def requests(count: int, *, model: str, max_tokens: int) -> list[dict[str, Any]]:
    """Bodies of so many requests, of all schemas in turn."""
    names = list(SCHEMAS)
    found = []
    for index in range(count):
        name = names[index % len(names)]
        subject = SUBJECTS[(index // len(names)) % len(SUBJECTS)]
        ask = f"Make up a {name} number {index} to do with {subject}. Answer in JSON."
        shape = {"name": name, "schema": SCHEMAS[name], "strict": True}
        found.append(
            {
                "model": model,
                "messages": [{"role": "user", "content": ask}],
                "temperature": 0,
                "max_tokens": max_tokens,
                "response_format": {"type": "json_schema", "json_schema": shape},
            }
        )
    return found


async def ask_all(
    url: str, bodies: Sequence[Mapping[str, Any]], *, concurrency: int
) -> list[dict[str, Any]]:
    """The responses, so many asked for at a time."""
    turns = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None)

    async def ask(session: aiohttp.ClientSession, body: Mapping[str, Any]) -> dict[str, Any]:
        async with turns, session.post(f"{url}/v1/chat/completions", json=body) as response:
            found: dict[str, Any] = await response.json()
            if response.status != 200:
                raise SystemExit(f"status {response.status}: {found}")
            return found

    async with aiohttp.ClientSession(timeout=timeout) as session:
        return await asyncio.gather(*(ask(session, body) for body in bodies))


def summed(
    bodies: Sequence[Mapping[str, Any]], responses: Sequence[Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    """Counts of one way of asking."""
    ended = valid = tokens = accepted = rejected = 0
    for body, response in zip(bodies, responses, strict=True):
        (choice,), usage = response["choices"], response["usage"]
        details = usage["completion_tokens_details"]
        tokens += usage["completion_tokens"]
        accepted += details["accepted_prediction_tokens"]
        rejected += details["rejected_prediction_tokens"]
        if choice["finish_reason"] == "stop":
            ended += 1
            schema = body["response_format"]["json_schema"]["schema"]
            valid += _is_valid(choice["message"]["content"], schema)
    cycles = tokens - accepted  # each commits one token of the target's own, the prefill too
    return {
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "ended_by_themselves": ended,
        "valid": valid,
        "accepted_drafts": accepted,
        "rejected_drafts": rejected,
        "tokens_per_cycle": round(tokens / cycles, 3),
    }


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {text!r}: {error}", flush=True)
        return False
    return True


def main() -> None:
    """A record; an error where an answer is not valid or the texts differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("records/structured-outputs.jsonl"))
    options = parser.parse_args()
    bodies = requests(options.requests, model=options.model, max_tokens=options.max_tokens)
    counts, texts = {}, {}
    for way, speculate in (("with_drafts", True), ("without_drafts", False)):
        asked = [{**body, "domino": {"speculate": speculate}} for body in bodies]
        start = time.perf_counter()
        responses = asyncio.run(ask_all(options.url, asked, concurrency=options.concurrency))
        counts[way] = summed(bodies, responses, time.perf_counter() - start)
        texts[way] = [response["choices"][0]["message"]["content"] for response in responses]
        print(way, counts[way], flush=True)
    pairs = zip(texts["with_drafts"], texts["without_drafts"], strict=True)
    record = {
        "what": "structured outputs",
        "model": options.model,
        "requests": options.requests,
        "concurrency": options.concurrency,
        "max_tokens": options.max_tokens,
        "schemas": len(SCHEMAS),
        "temperature": 0,
        **counts,
        "equal_texts": sum(one == other for one, other in pairs),
        "server": asyncio.run(_server_info(options.url)),
        "environment": environment(),
    }
    append_record(options.out, record)
    print(json.dumps(record, indent=1))
    wrong = [way for way, each in counts.items() if each["valid"] < each["ended_by_themselves"]]
    if wrong or record["equal_texts"] < options.requests:
        raise SystemExit(f"{options.requests - record['equal_texts']} texts differ; wrong: {wrong}")


async def _server_info(url: str) -> dict[str, Any]:
    """What the server says of itself."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/domino") as response,
    ):
        found: dict[str, Any] = await response.json()
        return found


if __name__ == "__main__":
    main()
