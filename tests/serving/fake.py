"""A service whose answers are written down: what HTTP does with them is all that is left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from domino_spec.api.prompts import encode_prompt
from domino_spec.decoding import Commit, RowStats, TextStream, TokenScore
from domino_spec.serving.asks import Ask, Block, Ended, Event, Failed, TooLongError
from domino_spec.serving.settings import ServerSettings
from tests.cli import tiny

MODEL = "tiny"
EOS = 0
BLOCK = 3
DRAFTS = 4
OTHER = 17
"""The token that comes second everywhere."""


@dataclass(frozen=True)
class FakeLimits:
    context: int = 256
    max_prompt_tokens: int = 200
    max_new_tokens: int = 128


@dataclass
class FakeTicket:
    events: list[Event]
    held: asyncio.Event | None
    held_at: int
    cancelled: bool = False
    position: int = 0

    def cancel(self) -> None:
        if self.position < len(self.events):
            self.cancelled = True

    def __aiter__(self) -> FakeTicket:
        return self

    async def __anext__(self) -> Event:
        if self.position == len(self.events):
            raise StopAsyncIteration
        if self.held is not None and self.position >= self.held_at:
            await self.held.wait()
        await asyncio.sleep(0)
        self.position += 1
        return self.events[self.position - 1]

    async def __aenter__(self) -> FakeTicket:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


@dataclass
class FakeService:
    """Says `text` to everybody, in blocks of three of which two are accepted drafts."""

    settings: ServerSettings = field(
        default_factory=lambda: ServerSettings(model=MODEL, page=False)
    )
    text: str = "the quick brown fox"
    tokens: Sequence[int] | None = None
    """Said instead of the text."""
    refuse: Exception | None = None
    fail: Callable[[int], Exception | None] = lambda _: None
    """Of a choice, the error behind its first block."""
    fail_at_once: Exception | None = None
    held: asyncio.Event | None = None
    """Answers wait for it."""
    held_at: int = 1
    """Behind how many events; 0 is in the queue."""
    state: str = "ready"
    created: int = 1700000000

    def __post_init__(self) -> None:
        self.tokenizer = tiny.make_tokenizer()
        self.limits = FakeLimits()
        self.asks: list[Ask] = []
        self.clients: list[str] = []
        self.tickets: list[FakeTicket] = []
        self.chats: list[tuple[list, dict]] = []

    async def start(self) -> None: ...

    async def stop(self, seconds: float) -> None: ...

    def facts(self):
        return {
            "model": MODEL,
            "draft": None,
            "speculates": True,
            "slots": 4,
            "context": self.limits.context,
            "version": "0",
            "device": "cpu",
        }

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(encode_prompt(text, self.tokenizer))

    def encode_chat(self, messages, options) -> tuple[int, ...]:
        self.chats.append((messages, dict(options)))
        return tuple(encode_prompt(messages, self.tokenizer, options))

    def submit(self, asks: Sequence[Ask], *, client: str) -> FakeTicket:
        if self.refuse is not None:
            raise self.refuse
        for ask in asks:
            if len(ask.prompt) + ask.params.max_new_tokens > self.limits.context:
                raise TooLongError("it does not fit.")
        self.asks += asks
        self.clients.append(client)
        # Choices take turns, as rows of one engine do.
        each = [self._events(choice, ask) for choice, ask in enumerate(asks)]
        longest = max(map(len, each))
        events = [row[turn] for turn in range(longest) for row in each if turn < len(row)]
        ticket = FakeTicket(events, self.held, self.held_at)
        self.tickets.append(ticket)
        return ticket

    def _events(self, choice: int, ask: Ask) -> list[Event]:
        if self.fail_at_once is not None:
            return [Failed(choice=choice, error=self.fail_at_once)]
        tokens, reason = self._cut(ask)
        events: list[Event] = []
        stats = RowStats()
        for cycle, block in enumerate([tokens[:1], *_blocks(tokens[1:])]):
            accepted = max(0, min(BLOCK - 1, len(block))) if cycle else 0
            if cycle:
                stats.record(drafts=DRAFTS, accepted=accepted, committed=len(block))
            last = sum(len(e.commit.tokens) for e in events) + len(block) == len(tokens)
            commit = Commit(
                choice,
                tuple(block),
                accepted,
                cycle,
                reason if last else None,
                scores=_scores(block, ask.params.logprobs),
            )
            events.append(Block(choice=choice, commit=commit, cached=2 + choice))
        error = self.fail(choice)
        if error is not None:
            return [events[0], Failed(choice=choice, error=error)]
        return [*events, Ended(choice=choice, reason=reason, stats=stats)]

    def _cut(self, ask: Ask) -> tuple[list[int], str]:
        said = self.tokens
        if said is None:
            said = [*self.tokenizer(self.text)["input_ids"], EOS]
        text, found = TextStream(self.tokenizer, ask.params.stop), []
        for token in said:
            found.append(token)
            text.push(token)
            if text.stopped:
                return found, "stop"
            if token == EOS and not ask.params.ignore_eos:
                return found, "eos"
            if len(found) == ask.params.max_new_tokens:
                break
        return found, "length"


def _blocks(tokens: Sequence[int]) -> list[Sequence[int]]:
    return [tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK)]


def _scores(tokens: Sequence[int], wanted: int | None) -> tuple[TokenScore, ...] | None:
    """Every token has three quarters, the other one an eighth, the mask nothing."""
    if wanted is None:
        return None
    ranks = ((None, math.log(0.75)), (OTHER, math.log(0.125)), (tiny.MASK, -math.inf))
    return tuple(
        TokenScore(
            ranks[0][1],
            tuple((token if one is None else one, score) for one, score in ranks[:wanted]),
        )
        for token in tokens
    )
