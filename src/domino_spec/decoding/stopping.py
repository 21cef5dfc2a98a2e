"""When a sequence ends. Rules look after every single token, so a block never overruns them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Strings
from typing import Any

import torch
from transformers import StoppingCriteriaList

from domino_spec.decoding.params import SamplingParams
from domino_spec.decoding.sequence import CRITERIA, EOS, LENGTH, STOP, Sequence, StopRule
from domino_spec.decoding.text import TextStream


def at_eos(token_ids: Collection[int]) -> StopRule:
    """Stop at an end-of-sequence token, which stays in the output."""
    ends = frozenset(token_ids)
    return lambda sequence: EOS if sequence.output[-1] in ends else None


def at_tokens(token_ids: Collection[int]) -> StopRule:
    """Stop at one of these tokens, which stays in the output."""
    ends = frozenset(token_ids)
    return lambda sequence: STOP if sequence.output[-1] in ends else None


def end_rules(params: SamplingParams, eos: Collection[int]) -> list[StopRule]:
    """Stop at the model's end-of-sequence tokens and at those that the parameters name."""
    rules = [at_eos(eos)] if eos and not params.ignore_eos else []
    return [*rules, at_tokens(params.stop_token_ids)] if params.stop_token_ids else rules


def at_length() -> StopRule:
    """Stop when exactly `max_new_tokens` were generated."""
    return lambda sequence: LENGTH if sequence.remaining <= 0 else None


def at_strings(stops: Strings[str], tokenizer: Any, **options: Any) -> StopRule:
    """Stop when the generated text contains one of these strings. One rule serves one sequence.

    `options` are those of `TextStream`.
    """
    # The text a caller gets is cut by the same object, so that the two cannot disagree.
    text = TextStream(tokenizer, stops, **options)

    def rule(sequence: Sequence) -> str | None:
        text.push(sequence.output[-1])
        return STOP if text.stopped else None

    return rule


def at_criteria(criteria: StoppingCriteriaList, device: torch.device) -> StopRule:
    """Stop when any of Transformers' criteria says so."""

    def rule(sequence: Sequence) -> str | None:
        kept = None if sequence.sampler is None else sequence.sampler.scores
        scores = None if kept is None else tuple(score.unsqueeze(0) for score in kept)
        stop = bool(criteria(sequence.ids(device), scores).any())
        if sequence.remaining <= 0:
            return LENGTH
        return CRITERIA if stop else None

    return rule
