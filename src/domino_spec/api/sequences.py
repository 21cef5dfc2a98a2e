"""Sequences from prompts: tokens, parameters, a seed and stop rules of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from domino_spec.api.images import encode_image_chat, holds_images
from domino_spec.api.prompts import Prompt, check_prompt, encode_prompt
from domino_spec.decoding import RunStats, SamplingParams, StopRule
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stopping import at_length, at_strings, end_rules
from domino_spec.decoding.text import text_options
from domino_spec.errors import InputError
from domino_spec.grammars import GrammarCompiler
from domino_spec.targets import Target


def make_sequences(
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    target: Target,
    tokenizer: Any | None,
    *,
    processor: Callable[[], Any],
    chat_options: Mapping[str, Any],
    ends: Collection[int],
    grammars: GrammarCompiler,
    run: RunStats | None = None,
    **options: Any,
) -> list[Decoded]:
    """One sequence a prompt; `options` are those of `Sequence`.

    `processor` gives the target's, for a chat with images.
    """
    if not prompts:
        raise InputError("there is no prompt; expected at least one.")
    sequences = []
    for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        values: dict[str, Any] = {"index": index, **options}
        if holds_images(prompt):
            target.check_images()
            tokens, values["multimodal_inputs"] = encode_image_chat(
                prompt,  # type: ignore[arg-type]
                processor(),
                tokenizer,
                chat_options,
                max_tokens=target.context_length,
            )
        else:
            tokens = encode_prompt(prompt, tokenizer, chat_options)
        check_prompt(tokens, own.max_new_tokens, target)
        own.check_vocabulary(target.vocab_size)
        own = own.for_sequence(index, len(prompts))
        rules = stop_rules(own, tokenizer, ends)
        if own.grammar is not None:
            values["matcher"] = grammars.compile(own.grammar).matcher()
        sequences.append(Decoded(tokens, own, stop_rules=rules, eos=ends, run=run, **values))
    return sequences


def stop_rules(
    params: SamplingParams,
    tokenizer: Any | None,
    ends: Collection[int],
    *,
    kept: Mapping[int, str] | None = None,
) -> list[StopRule]:
    """What ends a sequence: an end token, a stop string, its length.

    `kept` are the special tokens that are part of its text.
    """
    rules = end_rules(params, ends)
    if params.stop:
        if tokenizer is None:
            raise InputError("stop strings need a tokenizer; pass tokenizer=...")
        rules.append(at_strings(params.stop, tokenizer, kept=kept, **text_options(params)))
    return [*rules, at_length()]


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
