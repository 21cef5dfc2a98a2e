"""The service behind the routes: prompts in, tickets out."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from domino_spec import __version__
from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import encode_prompt
from domino_spec.api.rows import make_rows
from domino_spec.decoding import SamplingParams
from domino_spec.fast.engine import Engine
from domino_spec.fast.sizes import Size, free_bytes, token_bytes
from domino_spec.serving.asks import Ask, TooLongError, TooManyError
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import EngineLane, Lane, ReferenceLane
from domino_spec.serving.literal import LiteralChats
from domino_spec.serving.meters import Meter, Silence
from domino_spec.serving.settings import ServerSettings
from domino_spec.serving.sizing import context_of, limits_of, size_of, slots_beside
from domino_spec.serving.tickets import Ticket
from domino_spec.serving.worker import Worker

_PLAIN_SLOTS = 4
"""Rows without drafts, beside the others, for which there is always room."""
_UNKNOWN_CONTEXT = 4096
"""Where neither the target nor anybody else says how much it reads."""


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
        main, plain, capacity = self._lanes(said)
        self._slots = main.slots
        self.limits = limits_of(settings, capacity)
        self.worker = Worker(main, plain, max_queue=settings.max_queue, meter=meter or Silence())
        self._numbers = itertools.count()

    def _lanes(self, said: Callable[[str], None]) -> tuple[Lane, Callable[[], Lane] | None, int]:
        decoder, settings = self.decoder, self.settings
        drafts = decoder.drafter is not None
        context = decoder.target.context_length
        reason = decoder.why_not_engine()
        if reason is not None:
            said(f"one request at a time, through Transformers: {reason}")
            main: Lane = ReferenceLane(decoder, speculate=drafts)
            beside = (lambda: ReferenceLane(decoder, speculate=False)) if drafts else None
            return main, beside, context_of(settings, context) or _UNKNOWN_CONTEXT
        target = decoder.target
        each = token_bytes(target, decoder.drafter)
        size = size_of(
            settings,
            on_gpu=target.device.type == "cuda",
            context=context,
            token_bytes=each,
            free=free_bytes(target.device),
            beside=_PLAIN_SLOTS if drafts else 0,
        )
        if decoder.adapts:
            said("measuring what cycles cost on this machine (once; it is kept)")
        engine = decoder.make_engine(slots=size.slots, capacity=size.capacity, reuse=True)
        for scores in (None, 0) if settings.page else (None,):  # the page shows probabilities
            for temperature in (0.0, 1.0):
                engine.capture(1, SamplingParams(temperature=temperature, logprobs=scores))
        said(f"{size.slots} slots of {size.capacity} tokens")
        plain = (lambda: _plain(engine, each)) if drafts else None
        return EngineLane(engine), plain, size.capacity

    # For routes -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to answer."""
        self.worker.start()

    def drain(self, seconds: float | None = None) -> None:
        """Take nothing new; running answers may go on for a while."""
        self.worker.drain(self.settings.drain_seconds if seconds is None else seconds)

    async def stop(self, seconds: float | None = None) -> None:
        """Drain, and wait until the last answer has ended."""
        self.drain(seconds)
        await asyncio.to_thread(self.worker.join)

    @property
    def state(self) -> str:
        """`ready`, `stopping` or `failed`."""
        return self.worker.state

    @property
    def ended(self) -> bool:
        """Whether it answers nobody any more."""
        return self.worker.ended

    def facts(self) -> dict[str, Any]:
        """What anybody may know of it."""
        return {
            "model": self.settings.model,
            "draft": self._draft_name,
            "speculates": self.decoder.drafter is not None,
            "slots": self._slots,
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

    def submit(self, asks: Sequence[Ask], *, client: str) -> Ticket:
        """Queue these answers. Call it in the event loop that will read them."""
        ticket = Ticket(len(asks), self.worker.cancel)
        for choice, ask in enumerate(asks):
            ticket.jobs.append(self._job(ask, choice, client, ticket))
        self.worker.submit(ticket.jobs)
        return ticket

    def _job(self, ask: Ask, choice: int, client: str, ticket: Ticket) -> Job:
        self._check(ask)
        (row,) = make_rows(
            [ask.prompt],
            [ask.params],
            self.decoder.target,
            self.tokenizer,
            chat_options={},
            ends=self.decoder.eos_token_ids,
        )
        row.index = next(self._numbers)
        return Job(ask, row, choice, client, ticket.deliver)

    def _check(self, ask: Ask) -> None:
        limits, prompt, new = self.limits, len(ask.prompt), ask.params.max_new_tokens
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


def _plain(engine: Engine, token_bytes: int) -> Lane:
    """The same weights without drafts, in slots of their own."""
    size = Size(engine.slots.count, engine.capacity)
    free = free_bytes(engine.target.device)
    slots = slots_beside(size, least=_PLAIN_SLOTS, token_bytes=token_bytes, free=free)
    twin = engine.twin(slots=slots, capacity=engine.capacity)
    twin.speculates = False
    return EngineLane(twin)
