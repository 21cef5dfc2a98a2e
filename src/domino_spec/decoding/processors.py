"""Gives every row its own copy of the caller's logits processors."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from domino_spec.errors import InputError

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_TIED_TO_THE_BATCH = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
)


def for_row(processors: Iterable[LogitsProcessor], row: int, rows: int) -> LogitsProcessorList:
    """This row's own processors.

    Rows advance by different numbers of tokens a cycle, so each is processed alone; state that
    a processor keeps must not leak from one row into another.
    """
    if rows == 1:
        return LogitsProcessorList(processors)
    return LogitsProcessorList(_copy(processor, row) for processor in processors)


def warpers_of(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    """Those that look at one position's logits only, so that they fit drafts as well."""
    return LogitsProcessorList(p for p in processors if isinstance(p, _WARPERS))


def _copy(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    name = type(processor).__name__
    if isinstance(processor, _TIED_TO_THE_BATCH):
        raise InputError(
            f"{name} is tied to the whole batch's prompts, but rows are processed one by one; "
            "use it with one prompt at a time."
        )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return _prefix_constrained(processor, row)
    # Models and tokenizers inside a processor are shared, everything else is the row's own.
    shared = {
        id(value): value
        for value in vars(processor).values()
        if isinstance(value, (nn.Module, PreTrainedTokenizerBase))
    }
    try:
        return copy.deepcopy(processor, shared)
    except (TypeError, copy.Error, RuntimeError) as error:
        raise InputError(
            f"{name} cannot be copied for each row ({error}); use it with one prompt at a time."
        ) from error


def _prefix_constrained(processor: Any, row: int) -> LogitsProcessor:
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _batch, ids: allowed(row, ids), 1)
