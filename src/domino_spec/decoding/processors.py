"""Gives every sequence its own copy of the caller's logits processors and stopping criteria."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from domino_spec.decoding.params import SamplingParams
from domino_spec.errors import InputError

_Part = TypeVar("_Part")
_WARPERS: dict[type[LogitsProcessor], str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Fields of `SamplingParams`, in the order in which it applies them."""
_TIED_TO_THE_BATCH = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
)


def params_for_sequence(params: SamplingParams, index: int, count: int) -> SamplingParams:
    """The same parameters with processors of this sequence's own; pure hooks are shared."""
    if not params.processors:
        return params
    return replace(params, processors=tuple(for_sequence(params.processors, index, count)))


def for_sequence(
    processors: Iterable[LogitsProcessor], index: int, count: int
) -> LogitsProcessorList:
    """This sequence's own processors.

    Sequences advance by different numbers of tokens a cycle, so each is processed alone; state that
    a processor keeps must not leak from one sequence into another.
    """
    if count == 1:
        return LogitsProcessorList(processors)
    return LogitsProcessorList(_processor(processor, index) for processor in processors)


def criteria_for_sequence(criteria: StoppingCriteriaList, count: int) -> StoppingCriteriaList:
    """This sequence's own stopping criteria, for the same reason."""
    if count == 1:
        return criteria
    return StoppingCriteriaList(_own_copy(criterion) for criterion in criteria)


def split_warpers(
    processors: Iterable[LogitsProcessor],
) -> tuple[list[LogitsProcessor], dict[str, Any]]:
    """Processors, and fields of `SamplingParams` for the temperature and cut-offs at their end.

    As fields they fit drafts as well. Those in another order or with options of their own stay
    processors: the text's distribution is the same.
    """
    rest, fields = list(processors), {}
    following = list(_WARPERS)
    while rest and type(rest[-1]) in following and _is_usual(rest[-1]):
        last = rest.pop()
        fields[_WARPERS[type(last)]] = getattr(last, _WARPERS[type(last)])
        following = following[: following.index(type(last))]
    return rest, fields


def _is_usual(warper: LogitsProcessor) -> bool:
    usual = {"filter_value": -math.inf, "min_tokens_to_keep": 1}
    on = getattr(warper, _WARPERS[type(warper)]) > 0
    return on and all(getattr(warper, name, value) == value for name, value in usual.items())


def _processor(processor: LogitsProcessor, index: int) -> LogitsProcessor:
    tied = isinstance(processor, _TIED_TO_THE_BATCH)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        tied = processor.unconditional_context["input_ids"] is not None
    if tied:
        raise InputError(
            f"{type(processor).__name__} is tied to the whole batch's prompts, but "
            "sequences are processed one by one; use it with one prompt at a time."
        )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return _prefix_constrained(processor, index)
    return _own_copy(processor)


def _own_copy(part: _Part) -> _Part:
    # Models and tokenizers inside are shared, everything else is the sequence's own.
    shared = {id(value): value for value in _heavy_parts(vars(part))}
    try:
        return copy.deepcopy(part, shared)
    except (TypeError, copy.Error, RuntimeError) as error:
        raise InputError(
            f"{type(part).__name__} cannot be copied for each sequence ({error}); use it with one "
            "prompt at a time."
        ) from error


def _heavy_parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (nn.Module, PreTrainedTokenizerBase)):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _heavy_parts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _heavy_parts(inner)


def _prefix_constrained(processor: Any, index: int) -> LogitsProcessor:
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _batch, ids: allowed(index, ids), 1)
