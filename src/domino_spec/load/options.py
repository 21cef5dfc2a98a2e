"""From the options of either command line to a request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError
from domino_spec.load.bodies import parse_body
from domino_spec.load.request import Against, LoadRequest
from domino_spec.load.settings import Endpoint, Goals, Settings

KEY_VARIABLE = "OPENAI_API_KEY"
ROUNDS_AGAINST = 8
"""Enough to draw anew from."""


def request_of(
    *,
    url: str,
    concurrency: Sequence[int],
    rate: Sequence[float],
    prompts: Sequence[str],
    limit: int | None,
    system: str | None,
    model: str | None,
    name: str,
    endpoint: Endpoint,
    rounds: int | None,
    body: str | None,
    api_key: str | None,
    api_key_env: str,
    against: str | None,
    against_body: str | None,
    against_name: str,
    against_model: str | None,
    against_api_key_env: str | None,
    first_token_goal: float | None,
    token_goal: float | None,
    latency_goal: float | None,
    out: Path | None,
    **settings: Any,
) -> LoadRequest:
    """Options by their names; the rest are fields of `Settings`."""
    goals = Goals(first_token=first_token_goal, token=token_goal, latency=latency_goal)
    if rounds is None:
        rounds = 1 if against is None else ROUNDS_AGAINST
    other_key = None if against_api_key_env is None else os.environ.get(against_api_key_env)
    return LoadRequest(
        url=url,
        settings=Settings(endpoint=endpoint, rounds=rounds, goals=goals, **settings),
        concurrency=tuple(concurrency),
        rate=tuple(rate),
        prompts=tuple(prompts),
        limit=limit,
        system=system,
        name=name,
        model=model,
        body={} if body is None else parse_body(body),
        api_key=api_key or os.environ.get(api_key_env) or None,
        against=_against(
            against, against_body, name=against_name, model=against_model, api_key=other_key or None
        ),
        out=out,
    )


def _against(text: str | None, body: str | None, **others: Any) -> Against | None:
    """An address, or what a body says otherwise."""
    if text is None:
        if body is not None:
            raise InputError("there is a body for --against, but no --against; give the address.")
        return None
    if text.lstrip().startswith("{"):
        if body is not None:
            raise InputError("--against is a body already; expected an address beside a body.")
        return Against(body=parse_body(text), **others)
    return Against(url=text, body={} if body is None else parse_body(body), **others)
