"""The JSON that a request sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from domino_spec.errors import InputError
from domino_spec.load.settings import Endpoint, Settings, Side

if TYPE_CHECKING:
    from domino_spec.bench.tasks import Task

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def prompts_of(tasks: Sequence[Task], endpoint: Endpoint) -> list[dict[str, Any]]:
    """What each prompt puts into a body; the tasks in turns, so that every round has all of them."""
    longest = max(len(task.rows) for task in tasks)
    rows = [
        task.rows[i % len(task.rows)]
        for i in range(longest)
        for task in tasks
        if i < len(task.rows)
    ]
    if endpoint == "chat":
        return [
            {"messages": [*row.opening(), {"role": "user", "content": row.turns[0]}]}
            for row in rows
        ]
    if any(row.system is not None for row in rows):
        raise InputError(
            "a system message needs the chat endpoint; drop it, or take --endpoint chat."
        )
    return [{"prompt": row.turns[0]} for row in rows]


def body_of(
    side: Side, prompt: Mapping[str, Any], settings: Settings, *, number: int
) -> dict[str, Any]:
    """The whole body of request `number`: what all share, then what the side adds."""
    common: dict[str, Any] = {
        "model": side.model,
        **prompt,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + number,
        "stream": settings.stream,
    }
    if settings.stream:
        common["stream_options"] = {"include_usage": True}
    return merged(common, side.body)


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `extra` over those of `body`, inside objects too; null takes a field away."""
    result = dict(body)
    for name, value in extra.items():
        before = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def parse_body(text: str) -> dict[str, Any]:
    """Extra fields from a command line."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"the extra body {text!r} is not valid JSON ({error}); expected an object such as "
            '{"top_p": 0.9}.'
        ) from error
    if not isinstance(found, dict):
        raise InputError(f"the extra body is {text!r}; expected a JSON object.")
    if "stream" in found:
        raise InputError("the extra body says stream; expected --stream or --no-stream for that.")
    return found
