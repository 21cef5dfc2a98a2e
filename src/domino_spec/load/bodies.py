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
    """What each prompt puts into a body; the tasks in turns, so that rounds have of all."""
    longest = max(len(task.rows) for task in tasks)
    rows = [task.rows[i] for i in range(longest) for task in tasks if i < len(task.rows)]
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
        "seed": settings.seed + abs(number),
        "stream": settings.stream,
    }
    if settings.stream:
        common["stream_options"] = {"include_usage": True}
    return merged(common, side.body)


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `extra` over those of `body`, inside objects too; null takes a field away."""
    return _without_nulls(layered(body, extra))


def layered(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """The same with nulls kept, for what is yet to be laid over something."""
    result = dict(lower)
    for name, value in upper.items():
        before = result.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            result[name] = layered(before, value)
        else:
            result[name] = value
    return result


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in body.items()
        if value is not None
    }


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
