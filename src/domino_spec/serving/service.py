"""The service that HTTP handlers call: prompts in, streams of outputs out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from domino_spec import __version__
from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import check_ids
from domino_spec.api.sequences import stop_rules
from domino_spec.decoding import SamplingParams, StopRule
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.params import TOKEN_FIELDS
from domino_spec.engine.reference import FallbackEngine, ReferenceEngine
from domino_spec.engine.sizes import (
    LEAST_TOKENS,
    MOST_DRAFTING,
    Size,
    free_bytes,
    keeps_pages,
    slot_bytes,
    token_bytes,
)
from domino_spec.errors import InputError, TargetError
from domino_spec.serving.async_engine import AsyncEngine, OutputStream, StepEngine
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import ContextLengthError, at_param
from domino_spec.serving.grammars import GrammarService
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.middleware import CLIENT
from domino_spec.serving.protocol import ServerInfo
from domino_spec.serving.tokenization import PromptEncoder

_CAPTURE_SIZE = 64
"""Sequences for which cycles are captured at start; larger batches at their first use."""
_UNKNOWN_CONTEXT = 4096
"""Where neither the target nor the configuration says how long a sequence may be."""
_CPU_SLOTS = 8
"""A CPU is busy with few sequences: more of them only share it."""
_DEFAULT_CONTEXT, _CPU_DEFAULT_CONTEXT = 32768, 4096
"""Defaults: a context of millions would leave room for no other sequence."""
_MIN_CONTEXT = 512
_MIN_SLOTS = 4
"""So many sequences at a time are worth a shorter context."""
_MEMORY_SHARE = 0.6
"""Of the free memory; activations, prompts and the rest of the machine need some too."""


@dataclass(frozen=True)
class Limits:
    """What one sequence may take."""

    context: int
    """Prompt and output."""
    max_prompt_tokens: int
    max_new_tokens: int


def check_context(config: ServerConfig, context: int | None) -> int | None:
    """The configured context, if the target was made for as much; else the target's own."""
    if config.context is not None and context is not None and config.context > context:
        raise InputError(
            f"context is {config.context}; the target was made for {context}. Ask for less."
        )
    return config.context or context


def cache_size(
    config: ServerConfig,
    *,
    on_gpu: bool,
    context: int | None,
    token_bytes: int,
    slot_bytes: int = 0,
    free: int | None,
    paged: bool = False,
) -> Size:
    """Slots that the free bytes hold: fewer of them first, then shorter ones.

    `paged` slots take no memory before it is used: there are as many as have some tokens each, and
    they are shorter only where the memory does not hold a single long one. What the configuration
    names is kept, or refused where it cannot be had.
    """
    wanted = check_context(config, context)
    longest = _DEFAULT_CONTEXT if on_gpu else _CPU_DEFAULT_CONTEXT
    capacity = config.context or min(wanted or longest, longest)
    most = config.slots or (MOST_DRAFTING if on_gpu else _CPU_SLOTS)
    if free is None:
        return Size(most, capacity)
    room = int(_MEMORY_SHARE * free)

    if paged:
        return _paged_size(
            config, Size(most, capacity), room, token_bytes=token_bytes, slot_bytes=slot_bytes
        )

    def taken(slots: int, capacity: int) -> int:
        return (slots + 1) * (capacity * token_bytes + slot_bytes)

    if config.context is None:
        least = config.slots or min(most, _MIN_SLOTS)
        while taken(least, capacity) > room and capacity > _MIN_CONTEXT:
            capacity = max(capacity // 2, _MIN_CONTEXT)
    slots = most
    while config.slots is None and slots > 1 and taken(slots, capacity) > room:
        slots -= 1
    if (needed := taken(slots, capacity)) > room:
        raise InputError(
            f"{slots} slots of {capacity} tokens take {needed / 1e9:.1f} GB of memory; "
            f"{_MEMORY_SHARE * free / 1e9:.1f} GB are there for them. Ask for fewer slots or a "
            "shorter context."
        )
    return Size(slots, capacity)


def _paged_size(
    config: ServerConfig, wanted: Size, room: int, *, token_bytes: int, slot_bytes: int
) -> Size:
    slots, capacity = wanted.slots, wanted.capacity

    def held() -> int:
        return (room - (slots + 1) * slot_bytes) // token_bytes

    while config.slots is None and slots > 1 and held() < slots * LEAST_TOKENS:
        slots -= 1
    while config.context is None and held() < capacity and capacity > _MIN_CONTEXT:
        capacity = max(capacity // 2, _MIN_CONTEXT)
    if held() < capacity:
        raise InputError(
            f"{slots} slots, one of which holds {capacity} tokens, take "
            f"{((slots + 1) * slot_bytes + capacity * token_bytes) / 1e9:.1f} GB of memory; "
            f"{room / 1e9:.1f} GB are there for them. Ask for fewer slots or a shorter context."
        )
    return Size(slots, capacity, held() if held() < slots * capacity else None)


def sequence_limits(config: ServerConfig, capacity: int) -> Limits:
    """The configured limits, as far as a slot holds them."""
    return Limits(
        context=capacity,
        max_prompt_tokens=min(config.max_prompt_tokens or capacity, capacity - 1),
        max_new_tokens=min(config.max_new_tokens or capacity, capacity - 1),
    )


class Service:
    """A decoder, open to many callers at once."""

    def __init__(
        self,
        decoder: DominoDecoder,
        config: ServerConfig,
        *,
        draft_name: str | None = None,
        metrics: Metrics | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Makes the engine and measures what cycles cost, which takes a moment."""
        self.decoder = decoder
        self.config = config
        self.tokenizer = decoder.tokenizer
        self.created = int(time.time())
        self._draft_name = draft_name
        self._grammars = GrammarService(decoder.grammars)
        self.compile_grammar = self._grammars.compile
        self._ends, self._vocab_size = decoder.eos_token_ids, decoder.target.vocab_size
        engine, context = self._make_engine(log)
        self.limits = sequence_limits(config, context)
        self._prompts = PromptEncoder(self.tokenizer, max_tokens=self.limits.max_prompt_tokens)
        self.engine = AsyncEngine(engine, max_queue=config.max_queue, metrics=metrics or Metrics())

    def _make_engine(self, log: Callable[[str], None]) -> tuple[StepEngine, int]:
        """What decodes, and how many tokens a sequence may have."""
        decoder, config = self.decoder, self.config
        context = decoder.target.context_length
        reference = ReferenceEngine(decoder.target, decoder.drafter if decoder.depth else None)
        reason = decoder.unsupported_reason()
        if reason is not None:
            log(f"one request at a time, through Transformers: {reason}")
            return reference, check_context(config, context) or _UNKNOWN_CONTEXT
        target = decoder.target
        size = cache_size(
            config,
            on_gpu=target.device.type == "cuda",
            context=context,
            token_bytes=token_bytes(target, decoder.drafter),
            slot_bytes=slot_bytes(target, decoder.drafter),
            free=free_bytes(target.device),
            paged=keeps_pages(target),
        )
        if decoder.adapts:
            log("measuring what cycles cost on this machine (once; it is kept)")
        if target.reuse_refusal is not None:
            log(f"every prompt is computed from its beginning: {target.reuse_refusal}")
        engine = decoder.make_engine(
            slots=size.slots,
            capacity=size.capacity,
            tokens=size.tokens,
            reuse=target.reuse_refusal is None,
        )
        # Requests without drafts too: they are what a speedup is measured against.
        kinds: list[tuple[int | None, bool]] = [(None, True), (None, False)]
        if config.page:  # it shows probabilities
            kinds += [(0, True), (0, False)]
        sampling = [(0.0, None), (1.0, None), (1.0, 0)]  # a seed has an accept rule of its own
        for scores, drafts in kinds:
            for temperature, seed in sampling if drafts else sampling[:2]:
                params = SamplingParams(temperature=temperature, seed=seed, logprobs=scores)
                count = min(size.slots, _CAPTURE_SIZE) if scores is None else 1
                engine.capture(count, params, speculate=drafts)
        together = "" if size.tokens is None else f", {size.tokens:,} in all of them together"
        log(f"{size.slots} slots of {size.capacity} tokens{together}")
        if target.image_unsupported_reason is None:
            log("prompts with images: one request at a time, through Transformers")
            return FallbackEngine(engine, reference), size.capacity
        return engine, size.capacity

    # For handlers -------------------------------------------------------------------------------

    def drain(self, seconds: float | None = None) -> None:
        """Take nothing new; requests may go on for a while."""
        self.engine.drain(self.config.drain_seconds if seconds is None else seconds)

    async def stop(self, seconds: float | None = None) -> None:
        """Drain, and wait until the last request has ended."""
        self.drain(seconds)
        await asyncio.to_thread(self.engine.join)
        self._grammars.close()
        await asyncio.to_thread(self._prompts.close)

    def info(self) -> ServerInfo:
        """What /v1/domino tells."""
        return ServerInfo(
            model=self.config.model,
            draft=self._draft_name,
            speculates=self.decoder.speculates,
            slots=self.engine.slots,
            context=self.limits.context,
            version=__version__,
            device=str(self.decoder.target.device),
            dtype=self.decoder.target.dtype_name,
        )

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, as the tokenizer begins one."""
        return await self._prompts.encode_text(
            text, add_special_tokens=add_special_tokens, client=CLIENT.get()
        )

    async def decode_tokens(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        return await self._prompts.decode(tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Messages through the target's chat template; a request's options override ours."""
        most = self.limits.max_prompt_tokens
        if len(messages) > most:  # refused before the template is rendered, which takes seconds
            raise ContextLengthError(
                f"the prompt has {len(messages)} messages, each of a token or more; this server "
                f"takes {most} tokens. Shorten it."
            )
        given = {**self.decoder.chat_options, **options}
        return await self._prompts.encode_chat(
            messages, given, add_special_tokens=add_special_tokens, client=CLIENT.get()
        )

    async def encode_images(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Messages with images through the target's processor, in a thread."""
        try:
            self.decoder.target.check_images()
        except TargetError as error:
            raise InputError(str(error)) from error
        return await self._prompts.encode_images(
            messages,
            {**self.decoder.chat_options, **options},
            processor=self._processor,
            max_bytes=self.config.max_image_bytes,
            max_pixels=self.config.max_image_pixels,
            client=CLIENT.get(),
        )

    def _processor(self) -> Any:
        try:
            return self.decoder.processor
        except TargetError as error:  # of the server's own, which its log tells in full
            raise InputError(f"this server reads no images: {error}") from error

    def sequence(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        kept: Mapping[int, str] | None = None,
        rules: Sequence[StopRule] = (),
        **options: Any,
    ) -> Decoded:
        """A sequence for one choice; `options` are those of `Sequence`.

        `kept` are special tokens that are part of its text, `rules` further stop rules.
        """
        self._check(len(prompt), params.max_new_tokens)
        check_ids(prompt, self._vocab_size)
        for name in TOKEN_FIELDS:
            with at_param(name):
                params.check_vocabulary(self._vocab_size, (name,))
        rules = [*rules, *stop_rules(params, self.tokenizer, self._ends, kept=kept)]
        seed = params.seed_of(0)
        return Decoded(prompt, params, stop_rules=rules, eos=self._ends, seed=seed, **options)

    def submit(self, sequences: Sequence[Decoded], *, client: str) -> OutputStream:
        """Queue these sequences. Call it in the event loop that will read their outputs."""
        for sequence in sequences:
            sequence.client = client
        return self.engine.stream(sequences)

    def _check(self, prompt: int, new: int) -> None:
        limits = self.limits
        if prompt > limits.max_prompt_tokens:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens; this server takes {limits.max_prompt_tokens}. "
                "Shorten it."
            )
        if new > limits.max_new_tokens:
            raise ContextLengthError(
                f"{new} new tokens are requested; this server gives {limits.max_new_tokens}. "
                "Request fewer.",
                param="max_tokens",
            )
        if prompt + new > limits.context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {new} new ones are requested, together more "
                f"than the context of {limits.context}. Shorten the prompt, or request at most "
                f"{limits.context - prompt}."
            )
