"""Prompts and parameters as rows that a loop can decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from domino_spec.api.prompts import Prompt, check_prompt, encode_prompt
from domino_spec.decoding import Row, SamplingParams, StopRule, make_sampler
from domino_spec.decoding.processors import for_row
from domino_spec.decoding.stopping import at_eos, at_length, at_strings
from domino_spec.errors import InputError
from domino_spec.targets import Target


def make_rows(
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    target: Target,
    tokenizer: Any | None,
    *,
    chat_options: Mapping[str, Any],
    ends: Collection[int],
) -> list[Row]:
    """One row a prompt, each with a sampler and stop rules of its own."""
    if not prompts:
        raise InputError("there is no prompt; expected at least one.")
    rows = []
    for index, (prompt, row_params) in enumerate(zip(prompts, params, strict=True)):
        tokens = encode_prompt(prompt, tokenizer, chat_options)
        check_prompt(tokens, row_params.max_new_tokens, target)
        own = tuple(for_row(row_params.processors, index, len(prompts)))
        row_params = dataclasses.replace(row_params, processors=own)
        rows.append(
            Row(
                index,
                tokens,
                sampler=make_sampler(row_params, row=index, device=target.device),
                stop_rules=_stop_rules(row_params, tokenizer, ends),
                max_new_tokens=row_params.max_new_tokens,
                device=target.device,
            )
        )
    return rows


def _stop_rules(
    params: SamplingParams, tokenizer: Any | None, ends: Collection[int]
) -> list[StopRule]:
    rules = [] if params.ignore_eos else [at_eos(ends)]
    if params.stop:
        if tokenizer is None:
            raise InputError("stop strings need a tokenizer; pass tokenizer=...")
        rules.append(at_strings(params.stop, tokenizer))
    return [*rules, at_length()]
