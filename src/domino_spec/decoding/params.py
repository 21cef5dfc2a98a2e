"""How one sequence is to be generated, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, get_args

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from domino_spec.decoding.processors import (
    GeneratedPenalty,
    GrammarProcessor,
    HookProcessor,
    LogitBias,
    LogitsHook,
    MinTokens,
    for_sequence,
)
from domino_spec.errors import InputError
from domino_spec.grammars import Grammar, Matcher
from domino_spec.settings import AcceptRule

MOST_LOGPROBS = 20
TOKEN_FIELDS = ("logit_bias", "stop_token_ids")
"""Fields of `SamplingParams` that name tokens by their ids."""
MOST_BIAS = 100.0
"""As OpenAI's `logit_bias`: so much bans a token, or leaves no other."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one sequence is generated. The defaults are greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in prompt and answer, or multiplies those below 0."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer holds; negative ones encourage."""
    frequency_penalty: float = 0.0
    """Taken from it once for each time the answer holds it."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of single tokens, -100 to 100, before the penalties."""
    min_tokens: int = 0
    """No end token and no stop string ends the sequence before it has so many tokens."""
    seed: int | None = None
    """Sequence i of a batch draws from seed + i; None takes a fresh seed from torch's generator."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the sequence, with `ignore_eos` too; they stay in its tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the token that ended the sequence, in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Tell each token's log-probability as the target gave it, before anything above changed it,
    and those of so many likeliest tokens; None tells nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens but the first, all of which are computed for it."""
    processors: tuple[LogitsProcessor, ...] = ()
    """Any Transformers processors, run before temperature and the cut-offs. Each sees a position
    once, in order, after committed tokens alone: they may keep state."""
    grammar: Grammar | None = None
    """What the text must match: other tokens are banned, after all else but temperature and
    cut-offs changed the logits. The sequence ends where nothing can follow."""
    hooks: tuple[LogitsHook, ...] = ()
    """Run after the processors: pure functions of prompt and output so far (`LogitsHook`)."""
    accept: AcceptRule | None = None
    """How sampled drafts are accepted; all rules are exact. `coupled` draws drafts and target with
    the same noise, `match` drafts greedily: a draft is accepted while it is what the target draws,
    so that a seed gives plain decoding's text. `rejection` draws drafts from q and accepts each
    with min(1, p/q), `block` (block verification) decides about all drafts of a cycle together:
    both accept more, and a seed's text is another with another drafter or depth. None takes
    `coupled` where there is a seed, a grammar, processors or hooks, else `block`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        expected = "Transformers logits processors"
        object.__setattr__(self, "processors", _callables("processors", self.processors, expected))
        expected = "logits hooks: functions of prompt, output and logits"
        object.__setattr__(self, "hooks", _callables("hooks", self.hooks, expected))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _check_whole("max_new_tokens", self.max_new_tokens, 1, "1 or more")
        expected = f"0 (off) to max_new_tokens, {self.max_new_tokens}"
        _check_whole("min_tokens", self.min_tokens, 0, expected, self.max_new_tokens)
        _check_whole("top_k", self.top_k, 0, "0 (off) or a positive whole number")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, "None or a whole number from 0 to 2**62", 2**62)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                expected = f"None or a whole number from 0 to {MOST_LOGPROBS}"
                _check_whole(name, getattr(self, name), 0, expected, MOST_LOGPROBS)
        _check_real("temperature", self.temperature, "0 (greedy) or a positive number")
        _check_real("top_p", self.top_p, "more than 0 and at most 1 (off)", high=1, positive=True)
        _check_real("min_p", self.min_p, "0 (off) to 1", high=1)
        _check_real(
            "repetition_penalty",
            self.repetition_penalty,
            "a positive number (1 is off)",
            positive=True,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            expected = "a finite number (0 is off)"
            _check_real(name, getattr(self, name), expected, low=-math.inf)
        if self.accept is not None and self.accept not in get_args(AcceptRule):
            rules = ", ".join(map(repr, get_args(AcceptRule)))
            raise InputError(f"accept is {self.accept!r}; expected None or one of {rules}.")
        if self.accept == "block" and self.hooked:
            raise InputError(
                "accept is 'block' with processors or hooks: block verification looks at a whole "
                "block before it commits a token of it, and they see committed tokens alone. Take "
                "'coupled' or 'rejection'."
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InputError(
                f"grammar is {self.grammar!r}; expected a Grammar, such as "
                "Grammar.json_schema(...)."
            )
        if self.grammar is not None and self.accept in ("block", "rejection"):
            raise InputError(
                f"accept is {self.accept!r} with a grammar, which drafts are not drawn by. Take "
                "'coupled' or 'match'."
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn rather than taken greedily."""
        return self.temperature > 0

    @property
    def rule(self) -> AcceptRule:
        """The accept rule that holds."""
        keeps_text = self.seed is not None or self.hooked or self.grammar is not None
        return self.accept or ("coupled" if keeps_text else "block")

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts are drawn from the drafter's own distribution."""
        return self.samples and self.rule in ("rejection", "block")

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before cost anything."""
        given = bool(self.presence_penalty or self.frequency_penalty)
        return given or self.repetition_penalty != 1.0

    @property
    def biased(self) -> bool:
        """Whether single tokens are favoured, or forbidden for some time."""
        return bool(self.logit_bias or self.min_tokens)

    @property
    def hooked(self) -> bool:
        """Whether processors or hooks of the caller's own change logits."""
        return bool(self.processors or self.hooks)

    @property
    def constrained(self) -> bool:
        """Whether a grammar, and nothing else that the host must run, changes logits."""
        return self.grammar is not None and not self.hooked

    def end_ids(self, eos: Collection[int]) -> frozenset[int]:
        """Tokens that end a sequence of a model with these end-of-sequence tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos))

    def check_vocabulary(self, vocab_size: int, names: Sequence[str] = TOKEN_FIELDS) -> None:
        """Refuse token ids, in these fields, that the target does not have."""
        for name in names:
            ids = dict(self.logit_bias) if name == "logit_bias" else self.stop_token_ids
            if ids and max(ids) >= vocab_size:
                raise InputError(
                    f"{name} holds the token id {max(ids)}, outside the vocabulary of {vocab_size};"
                    " was it made with another model's tokenizer?"
                )

    def seed_of(self, index: int) -> int:
        """The seed of sequence `index` of a batch: seed + index, or a fresh one."""
        if not self.samples:
            return 0
        if self.seed is None:
            return int(torch.randint(2**62, ()).item())
        return self.seed + index

    def for_sequence(self, index: int, count: int) -> SamplingParams:
        """The same with processors of one sequence's own; pure hooks are shared."""
        if not self.processors:
            return self
        return replace(self, processors=tuple(for_sequence(self.processors, index, count)))

    def warpers(self) -> LogitsProcessorList:
        """Temperature and cut-offs: they look at one position's logits only."""
        chain = LogitsProcessorList()
        if not self.samples:
            return chain
        if self.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            chain.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p > 0.0:
            chain.append(MinPLogitsWarper(float(self.min_p)))
        return chain

    def all_processors(
        self,
        prompt_length: int,
        end_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> LogitsProcessorList:
        """Everything applied to the target's logits, in Transformers' own order."""
        chain = LogitsProcessorList()
        if self.logit_bias:
            chain.append(LogitBias(dict(self.logit_bias)))
        if self.min_tokens and end_ids:
            chain.append(MinTokens(prompt_length + self.min_tokens, end_ids))
        if self.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            chain.append(
                GeneratedPenalty(
                    presence=float(self.presence_penalty),
                    frequency=float(self.frequency_penalty),
                    prompt_length=prompt_length,
                )
            )
        chain.extend(self.processors)
        chain.extend(HookProcessor(hook, prompt_length) for hook in self.hooks)
        if matcher is not None:
            chain.append(GrammarProcessor(matcher))
        chain.extend(self.warpers())
        return chain


def _check_whole(name: str, value: Any, low: int, expected: str, high: int | None = None) -> None:
    # Plain numbers first: asking an abstract class takes longer than all else here.
    whole = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if not whole or value < low or (high is not None and value > high):
        raise InputError(f"{name} is {value!r}; expected {expected}.")


def _check_real(
    name: str,
    value: Any,
    expected: str,
    *,
    low: float = 0.0,
    high: float = math.inf,
    positive: bool = False,
) -> None:
    plain = type(value) in (float, int)
    real = plain or (isinstance(value, Real) and not isinstance(value, bool))
    real = real and math.isfinite(value)
    if not real or value < low or value > high or (positive and value == 0):
        raise InputError(f"{name} is {value!r}; expected {expected}.")


def _strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise InputError(f"stop holds {text!r}; expected strings.")
        if not text:
            raise InputError("an empty stop string would stop at once; leave it out.")
    return stops


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    expected = f"token ids, each with a number from -{MOST_BIAS:g} to {MOST_BIAS:g}"
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"logit_bias holds {pair!r}; expected {expected}.")
        _check_whole("a token id of logit_bias", pair[0], 0, "a whole number from 0")
        name = f"logit_bias of token {pair[0]}"
        _check_real(name, pair[1], expected, low=-MOST_BIAS, high=MOST_BIAS)
        found[int(pair[0])] = float(pair[1])
    return tuple(sorted(found.items()))


def _token_ids(given: Any) -> tuple[int, ...]:
    for token in given or ():
        _check_whole("a token id of stop_token_ids", token, 0, "a whole number from 0")
    return tuple(dict.fromkeys(map(int, given or ())))


def _callables(name: str, given: Any, expected: str) -> tuple[Any, ...]:
    if callable(given) and not isinstance(given, (list, tuple)):
        given = (given,)
    for each in given or ():
        if not callable(each):
            raise InputError(f"{name} holds {each!r}; expected {expected}.")
    return tuple(given or ())
