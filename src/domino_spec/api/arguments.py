"""Arguments of the decoder, checked and spread over the rows of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec.decoding import SamplingParams
from domino_spec.drafter import DrafterConfig
from domino_spec.errors import InputError


def params_per_row(
    params: SamplingParams | Sequence[SamplingParams] | None,
    overrides: Mapping[str, Any],
    rows: int,
) -> list[SamplingParams]:
    """One set of parameters a row, with the caller's overrides."""
    if params is None:
        params = SamplingParams()
    per_row = [params] * rows if isinstance(params, SamplingParams) else list(params)
    for row in per_row:
        if not isinstance(row, SamplingParams):
            raise InputError(
                f"sampling parameters are {row!r}; expected SamplingParams, or its fields as "
                "keyword arguments."
            )
    if len(per_row) != rows:
        raise InputError(f"there are {rows} prompts but {len(per_row)} sampling parameters.")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(
            f"no sampling parameter is called {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known))}."
        )
    return [dataclasses.replace(row, **overrides) for row in per_row] if overrides else per_row


def checked_depth(depth: int | None, config: DrafterConfig | None) -> int:
    """How many drafts a cycle: what was asked for, or the drafter's own default."""
    if config is None:
        return 0
    if depth is None:
        return config.default_depth
    if not 0 <= depth <= config.max_depth:
        raise InputError(
            f"depth is {depth}; this drafter ({config.alignment}, block of {config.block_size}) "
            f"gives 0 to {config.max_depth} drafts a cycle."
        )
    return depth


def checked_candidates(candidates: int | None) -> int | None:
    """How many candidates a slot, None for all."""
    if candidates is not None and candidates < 1:
        raise InputError(f"candidates is {candidates}; expected 1 or more; leave it out for all.")
    return candidates
