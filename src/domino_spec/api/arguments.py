"""Arguments of the decoder, checked and spread over the sequences of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError


def params_per_sequence(
    params: SamplingParams | Sequence[SamplingParams] | None,
    overrides: Mapping[str, Any],
    count: int,
) -> list[SamplingParams]:
    """One set of parameters a sequence, with the caller's overrides."""
    if params is None:
        params = SamplingParams()
    found = [params] * count if isinstance(params, SamplingParams) else list(params)
    for each in found:
        if not isinstance(each, SamplingParams):
            raise InputError(
                f"sampling parameters are {each!r}; expected SamplingParams, or its fields as "
                "keyword arguments."
            )
    if len(found) != count:
        raise InputError(f"there are {count} prompts but {len(found)} sampling parameters.")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(
            f"no sampling parameter is called {', '.join(unknown)}; "
            f"known are {', '.join(sorted(known))}."
        )
    return [dataclasses.replace(each, **overrides) for each in found] if overrides else found
