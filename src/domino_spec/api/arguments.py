"""Arguments of the decoder, checked and spread over the rows of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec.decoding import SamplingParams
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
