"""Rules that change logits: hooks, penalties, and Transformers' processors, one copy a sequence."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Tokens
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
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

from domino_spec.errors import InputError
from domino_spec.grammars import Matcher

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


class LogitsHook(Protocol):
    """Changes the target's logits for the token after `prompt` and `output`: a mask, a bias.

    A pure function of these tokens: with the same ones it gives the same logits, whatever it was
    asked before. Then one hook serves any number of sequences, and no draft can disturb it. It may
    write into the logits it is given, and must leave the tokens alone.
    """

    def __call__(
        self,
        prompt: Tokens[int],
        output: Tokens[int],
        logits: Tensor,  # [vocabulary] float32, on the target's device
        /,
    ) -> Tensor:
        """The logits to choose from, [vocabulary]; -inf bans a token."""
        ...


def apply_hook(
    hook: LogitsHook, prompt: Tokens[int], output: Tokens[int], logits: Tensor
) -> Tensor:
    """What a hook gives; an error that names hook and position where it fails."""
    name = getattr(hook, "__name__", type(hook).__name__)
    where = f"the logits hook {name} at position {len(prompt) + len(output)}"
    try:
        found = hook(prompt, output, logits)
    except Exception as error:
        raise InputError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or found.shape != logits.shape:
        given = list(found.shape) if isinstance(found, Tensor) else repr(found)
        raise InputError(f"{where} gave {given}; expected logits {list(logits.shape)}.")
    return found


def no_token_left(position: int) -> InputError:
    """Where all that bans tokens leaves none: `position` counts prompt and output."""
    return InputError(
        f"no token is left at position {position}: the logits processors and hooks ban all of "
        "them, or all that the grammar allows. Leave one at least, such as the end token."
    )


def banned_tokens(masks: Tensor, vocabulary: int) -> Tensor:
    """Whether each token is banned, [..., vocabulary] bool, by masks [..., words] int32.

    Tokens that the masks do not know are.
    """
    packed = (~masks).view(torch.uint8)
    if packed.device.type == "cpu":  # a tenth of the time
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1, bitorder="little"))
    else:
        places = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = ((packed.unsqueeze(-1) >> places) & 1).flatten(-2)
    if bits.shape[-1] < vocabulary:
        bits = nn.functional.pad(bits, (0, vocabulary - bits.shape[-1]), value=1)
    return bits[..., :vocabulary].view(torch.bool)


def next_banned(matcher: Matcher, vocabulary: int, device: torch.device) -> Tensor:
    """Whether each token is banned as the sequence's next one, [vocabulary]."""
    mask = np.empty(matcher.words, dtype=np.int32)
    matcher.fill(mask)
    return banned_tokens(torch.from_numpy(mask), vocabulary).to(device)


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """A sequence's grammar as a Transformers processor, for the reference loop.

    The matcher follows the sequence as it commits tokens.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Scores [1, vocabulary] without the tokens that may not follow."""
        banned = next_banned(self._matcher, scores.shape[-1], scores.device)
        return scores.masked_fill(banned, -torch.inf)


class HookProcessor(LogitsProcessor):  # type: ignore[misc]
    """A hook as a Transformers processor, for the reference loop."""

    def __init__(self, hook: LogitsHook, prompt_length: int) -> None:
        self._hook, self._prompt_length = hook, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [batch, vocabulary] after `input_ids` [batch, length]."""
        found = []
        for ids, own in zip(input_ids.tolist(), scores, strict=True):
            prompt, output = ids[: self._prompt_length], ids[self._prompt_length :]
            found.append(apply_hook(self._hook, prompt, output, own))
        return torch.stack(found)


def less_repeated(
    scores: Tensor,  # [batch, vocabulary] float32
    counts: Tensor,  # [batch, vocabulary] float32: how often each token was generated
    *,
    presence: float | Tensor,
    frequency: float | Tensor,
) -> Tensor:
    """Scores less `frequency` for each time, and less `presence` for having come at all."""
    return scores - (frequency * counts + presence * (counts > 0).to(scores.dtype))


class GeneratedPenalty(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties as a Transformers processor. The prompt costs nothing."""

    def __init__(self, *, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalise what comes after the prompt in `input_ids` [batch, length]."""
        generated = input_ids[:, self.prompt_length :]
        once = torch.ones_like(generated, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, generated, once)
        return less_repeated(scores, counts, presence=self.presence, frequency=self.frequency)


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """A number added to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = bias
        self._dense: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Scores [batch, vocabulary] with each token's bias."""
        if self._dense is None:
            self._dense = dense_bias(self._bias, scores.shape[1]).to(scores.device)
        return scores + self._dense


class MinTokens(LogitsProcessor):  # type: ignore[misc]
    """Bans end tokens before prompt and output together are so long."""

    def __init__(self, length: int, end_ids: Collection[int]) -> None:
        self._length, self._ends = length, sorted(end_ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [batch, vocabulary] after `input_ids` [batch, length]."""
        if input_ids.shape[1] >= self._length:
            return scores
        ends = torch.tensor(self._ends, device=scores.device)
        return scores.index_fill(1, ends, -math.inf)


def dense_bias(bias: Mapping[int, float], vocabulary: int) -> Tensor:
    """The same for every token, [vocabulary] float32."""
    dense = torch.zeros(vocabulary, dtype=torch.float32)
    dense[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
    return dense


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
