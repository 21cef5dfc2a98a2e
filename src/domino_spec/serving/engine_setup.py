"""From a decoder to a service: the engine, its caches, and what makes sequences for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.api.sequences import stop_rules
from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine.reference import FallbackEngine, ReferenceEngine
from domino_spec.engine.sizes import MOST_DRAFTING, Size, free_bytes, token_bytes
from domino_spec.errors import InputError, TargetError
from domino_spec.serving.async_engine import AsyncEngine, StepEngine
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.grammars import GrammarService
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.service import Limits, RuleMaker, ServedModel, Service

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
    free: int | None,
) -> Size:
    """Slots that the free bytes hold: fewer of them first, then shorter ones.

    What the configuration names is kept, or refused where it cannot be had.
    """
    wanted = check_context(config, context)
    longest = _DEFAULT_CONTEXT if on_gpu else _CPU_DEFAULT_CONTEXT
    capacity = config.context or min(wanted or longest, longest)
    most = config.slots or (MOST_DRAFTING if on_gpu else _CPU_SLOTS)
    if free is None:
        return Size(most, capacity)
    room = int(_MEMORY_SHARE * free) // token_bytes  # tokens
    if config.context is None:
        least = config.slots or min(most, _MIN_SLOTS)
        while (least + 1) * capacity > room and capacity > _MIN_CONTEXT:
            capacity = max(capacity // 2, _MIN_CONTEXT)
    slots = most
    while config.slots is None and slots > 1 and (slots + 1) * capacity > room:
        slots -= 1
    if (slots + 1) * capacity > room:
        taken = (slots + 1) * capacity * token_bytes
        raise InputError(
            f"{slots} slots of {capacity} tokens take {taken / 1e9:.1f} GB of memory; "
            f"{_MEMORY_SHARE * free / 1e9:.1f} GB are there for them. Ask for fewer slots or a "
            "shorter context."
        )
    return Size(slots, capacity)


def sequence_limits(config: ServerConfig, capacity: int) -> Limits:
    """The configured limits, as far as a slot holds them."""
    return Limits(
        context=capacity,
        max_prompt_tokens=min(config.max_prompt_tokens or capacity, capacity - 1),
        max_new_tokens=min(config.max_new_tokens or capacity, capacity - 1),
    )


def local_service(
    decoder: DominoDecoder,
    config: ServerConfig,
    *,
    draft_name: str | None = None,
    metrics: Metrics | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Service:
    """A service whose engine is a thread of this process."""
    engine, model = prepare(decoder, config, draft_name=draft_name, log=log)
    return Service(
        model,
        config,
        engine=AsyncEngine(engine, max_queue=config.max_queue, metrics=metrics or Metrics()),
        make_sequence=SequenceMaker(decoder.tokenizer),
        grammars=GrammarService(decoder.grammars),
        load_processor=lambda: decoder.processor,
    )


class SequenceMaker:
    """Makes sequences for an engine in this process."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos: frozenset[int],
        kept: Mapping[int, str] | None,
        rules: Sequence[RuleMaker],
        **options: Any,
    ) -> Decoded:
        """With its stop rules."""
        made = [make(self._tokenizer, params) for make in rules]
        made += stop_rules(params, self._tokenizer, eos, kept=kept)
        return Decoded(prompt, params, stop_rules=made, eos=eos, **options)


def prepare(
    decoder: DominoDecoder,
    config: ServerConfig,
    *,
    draft_name: str | None,
    log: Callable[[str], None],
) -> tuple[StepEngine, ServedModel]:
    """What decodes, and what handlers know of it; measures what cycles cost, if need be."""
    engine, context = make_engine(decoder, config, log)
    target, image_refusal = decoder.target, None
    try:
        target.check_images()
    except TargetError as error:
        image_refusal = str(error)
    return engine, ServedModel(
        tokenizer=decoder.tokenizer,
        chat_options=decoder.chat_options,
        ends=frozenset(decoder.eos_token_ids),
        vocab_size=target.vocab_size,
        limits=sequence_limits(config, context),
        speculates=decoder.speculates,
        draft_name=draft_name,
        device=str(target.device),
        dtype=target.dtype_name,
        image_refusal=image_refusal,
    )


def make_engine(
    decoder: DominoDecoder, config: ServerConfig, log: Callable[[str], None]
) -> tuple[StepEngine, int]:
    """What decodes, and how many tokens a sequence may have."""
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
        free=free_bytes(target.device),
    )
    if decoder.adapts:
        log("measuring what cycles cost on this machine (once; it is kept)")
    engine = decoder.make_engine(slots=size.slots, capacity=size.capacity, reuse=True)
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
    log(f"{size.slots} slots of {size.capacity} tokens")
    if target.image_unsupported_reason is None:
        log("prompts with images: one request at a time, through Transformers")
        return FallbackEngine(engine, reference), size.capacity
    return engine, size.capacity
