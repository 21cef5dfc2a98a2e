"""When a row ends. Rules look after every single token, so a block never overruns them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from transformers import StoppingCriteriaList

from domino_spec.decoding.rows import Row, StopRule

EOS, LENGTH, STOP, CRITERIA = "eos", "length", "stop", "criteria"


def at_eos(token_ids: Collection[int]) -> StopRule:
    """Stop at an end-of-sequence token, which stays in the output."""
    ends = frozenset(token_ids)
    return lambda row: EOS if row.generated[-1] in ends else None


def at_length() -> StopRule:
    """Stop when exactly `max_new_tokens` were generated."""
    return lambda row: LENGTH if row.remaining <= 0 else None


def at_strings(stops: Sequence[str], tokenizer: Any) -> StopRule:
    """Stop when the generated text contains one of these strings."""
    # A character is at most four bytes and a token at least one byte.
    window = 4 * max(len(stop) for stop in stops) + 4

    def rule(row: Row) -> str | None:
        tail = tokenizer.decode(row.generated[-window:], skip_special_tokens=False)
        return STOP if any(stop in tail for stop in stops) else None

    return rule


def at_criteria(criteria: StoppingCriteriaList) -> StopRule:
    """Stop when any of Transformers' criteria says so."""

    def rule(row: Row) -> str | None:
        if bool(criteria(row.ids, None).any()):
            return LENGTH if row.remaining <= 0 else CRITERIA
        return LENGTH if row.remaining <= 0 else None

    return rule
