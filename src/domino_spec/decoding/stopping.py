"""When a row ends. Rules look after every single token, so a block never overruns them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import StoppingCriteriaList

from domino_spec.decoding.rows import Row, StopRule
from domino_spec.decoding.text import TextStream

EOS, LENGTH, STOP, CRITERIA = "eos", "length", "stop", "criteria"


def at_eos(token_ids: Collection[int]) -> StopRule:
    """Stop at an end-of-sequence token, which stays in the output."""
    ends = frozenset(token_ids)
    return lambda row: EOS if row.generated[-1] in ends else None


def at_length() -> StopRule:
    """Stop when exactly `max_new_tokens` were generated."""
    return lambda row: LENGTH if row.remaining <= 0 else None


def at_strings(stops: Sequence[str], tokenizer: Any) -> StopRule:
    """Stop when the generated text contains one of these strings. One rule serves one row."""
    # The text a caller gets is cut by the same object, so that the two cannot disagree.
    text = TextStream(tokenizer, stops)

    def rule(row: Row) -> str | None:
        text.push(row.generated[-1])
        return STOP if text.stopped else None

    return rule


def at_criteria(criteria: StoppingCriteriaList) -> StopRule:
    """Stop when any of Transformers' criteria says so."""

    def rule(row: Row) -> str | None:
        scores = None if row.scores is None else tuple(s.unsqueeze(0) for s in row.scores)
        if bool(criteria(row.ids, scores).any()):
            return LENGTH if row.remaining <= 0 else CRITERIA
        return LENGTH if row.remaining <= 0 else None

    return rule
