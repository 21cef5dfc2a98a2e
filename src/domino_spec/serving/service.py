"""The service that the routes call: prompts in, streams of outputs out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from domino_spec import __version__
from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import encode_prompt
from domino_spec.api.sequences import make_sequences
from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine.reference import ReferenceEngine
from domino_spec.engine.sizes import free_bytes, token_bytes
from domino_spec.serving.async_engine import AsyncEngine, OutputStream, StepEngine
from domino_spec.serving.errors import TooLongError, TooManyError
from domino_spec.serving.literal import LiteralChats
from domino_spec.serving.meters import Meter, Silence
from domino_spec.serving.settings import ServerSettings
from domino_spec.serving.sizing import context_of, limits_of, size_of

_CAPTURED = 32
"""Sequences for which cycles are captured at start; larger batches at their first use."""
_UNKNOWN_CONTEXT = 4096
"""Where neither the target nor the settings say how long a sequence may be."""


class Service:
    """A decoder, open to many callers at once."""

    def __init__(
        self,
        decoder: DominoDecoder,
        settings: ServerSettings,
        *,
        draft_name: str | None = None,
        meter: Meter | None = None,
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Makes the engine and measures what cycles cost, which takes a moment."""
        self.decoder = decoder
        self.settings = settings
        self.tokenizer = decoder.tokenizer
        self.created = int(time.time())
        self._draft_name = draft_name
        self._chats = LiteralChats(self.tokenizer)
        engine, context = self._engine(said)
        self.limits = limits_of(settings, context)
        self.engine = AsyncEngine(engine, max_queue=settings.max_queue, meter=meter or Silence())

    def _engine(self, said: Callable[[str], None]) -> tuple[StepEngine, int]:
        """What decodes, and how many tokens a sequence may have."""
        decoder, settings = self.decoder, self.settings
        context = decoder.target.context_length
        reason = decoder.unsupported_reason()
        if reason is not None:
            said(f"one request at a time, through Transformers: {reason}")
            reference = ReferenceEngine(
                decoder.target, lambda drafts: decoder.proposer(speculate=drafts)
            )
            return reference, context_of(settings, context) or _UNKNOWN_CONTEXT
        target = decoder.target
        size = size_of(
            settings,
            on_gpu=target.device.type == "cuda",
            context=context,
            token_bytes=token_bytes(target, decoder.drafter),
            free=free_bytes(target.device),
        )
        if decoder.adapts:
            said("measuring what cycles cost on this machine (once; it is kept)")
        engine = decoder.make_engine(slots=size.slots, capacity=size.capacity, reuse=True)
        kinds: list[tuple[int | None, bool]] = [(None, True)]
        if settings.page:  # it shows probabilities, and times runs without drafts too
            kinds += [(0, True), (0, False)]
        for scores, drafts in kinds:
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature, logprobs=scores)
                few = scores is None and drafts
                engine.capture(min(size.slots, _CAPTURED) if few else 1, params, speculate=drafts)
        said(f"{size.slots} slots of {size.capacity} tokens")
        return engine, size.capacity

    # For routes -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to answer."""
        self.engine.start()

    def drain(self, seconds: float | None = None) -> None:
        """Take nothing new; running answers may go on for a while."""
        self.engine.drain(self.settings.drain_seconds if seconds is None else seconds)

    async def stop(self, seconds: float | None = None) -> None:
        """Drain, and wait until the last answer has ended."""
        self.drain(seconds)
        await asyncio.to_thread(self.engine.join)

    @property
    def state(self) -> str:
        """`ready`, `stopping` or `failed`."""
        return self.engine.state

    @property
    def ended(self) -> bool:
        """Whether it answers nobody any more."""
        return self.engine.ended

    def facts(self) -> dict[str, Any]:
        """What anybody may know of it."""
        return {
            "model": self.settings.model,
            "draft": self._draft_name,
            "speculates": self.decoder.speculates,
            "slots": self.engine.slots,
            "context": self.limits.context,
            "version": __version__,
            "device": str(self.decoder.target.device),
        }

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A text's tokens, as the tokenizer begins one."""
        return tuple(encode_prompt(text, self.tokenizer))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Messages through the target's chat template; a caller's options come before ours."""
        chosen = {**self.decoder.chat_options, **options}
        return tuple(self._chats.encode(messages, chosen))

    def sequence(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Decoded:
        """A sequence for one answer; `options` are those of `Sequence`."""
        self._check(len(prompt), params.max_new_tokens)
        (made,) = make_sequences(
            [list(prompt)],
            [params],
            self.decoder.target,
            self.tokenizer,
            chat_options={},
            ends=self.decoder.eos_token_ids,
            seed=params.seed_of(0),
            **options,
        )
        return made

    def submit(self, sequences: Sequence[Decoded], *, client: str) -> OutputStream:
        """Queue these sequences. Call it in the event loop that will read their outputs."""
        for sequence in sequences:
            sequence.client = client
        stream = OutputStream(sequences, self.engine.cancel)
        self.engine.submit(sequences)
        return stream

    def _check(self, prompt: int, new: int) -> None:
        limits = self.limits
        if prompt > limits.max_prompt_tokens:
            raise TooLongError(
                f"the prompt has {prompt} tokens; this server takes {limits.max_prompt_tokens}. "
                "Shorten it."
            )
        if new > limits.max_new_tokens:
            raise TooManyError(
                f"{new} new tokens are asked for; this server gives {limits.max_new_tokens}. Ask "
                "for fewer."
            )
        if prompt + new > limits.context:
            raise TooLongError(
                f"the prompt has {prompt} tokens and {new} new ones are asked for, together more "
                f"than the context of {limits.context}. Shorten the prompt, or ask for at most "
                f"{limits.context - prompt}."
            )
