"""A service whose answers are written down: what HTTP does with them is all that is left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from domino_spec.api.prompts import encode_text, render_chat
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput, TextStream, TokenScore
from domino_spec.grammars import CompiledGrammar, GrammarCompiler, Vocabulary
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import ContextLengthError
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
class FakeStream:
    outputs: list[SequenceOutput]
    held: asyncio.Event | None
    held_at: int
    cancelled: bool = False
    position: int = 0

    def cancel(self) -> None:
        if self.position < len(self.outputs):
            self.cancelled = True

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        if self.position == len(self.outputs):
            raise StopAsyncIteration
        if self.held is not None and self.position >= self.held_at:
            await self.held.wait()
        await asyncio.sleep(0)
        self.position += 1
        return [self.outputs[self.position - 1]]

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


@dataclass
class FakeService:
    """Says `text` to every request, in blocks of three of which two are accepted drafts."""

    config: ServerConfig = field(default_factory=lambda: ServerConfig(model=MODEL, page=False))
    text: str = "the quick brown fox"
    tokens: Sequence[int] | None = None
    """Said instead of the text."""
    refuse: Exception | None = None
    fail: Callable[[int], Exception | None] = lambda _: None
    """Of a choice, the error after its first block."""
    fail_at_once: Exception | None = None
    held: asyncio.Event | None = None
    """Answers wait for it."""
    held_at: int = 1
    """After how many outputs; 0 is in the queue."""
    state: str = "ready"
    created: int = 1700000000

    def __post_init__(self) -> None:
        self.tokenizer = tiny.make_tokenizer()
        self.limits = FakeLimits()
        self.grammars = GrammarCompiler(lambda: Vocabulary.of(self.tokenizer, rows=600, ends=[EOS]))
        self.sequences: list[Decoded] = []
        self.clients: list[str] = []
        self.streams: list[FakeStream] = []
        self.chats: list[tuple[list, dict]] = []

    @property
    def engine(self) -> FakeService:
        return self

    def start(self) -> None: ...

    async def stop(self, seconds: float) -> None: ...

    def info(self):
        return {
            "model": MODEL,
            "draft": None,
            "speculates": True,
            "slots": 4,
            "context": self.limits.context,
            "version": "0",
            "device": "cpu",
            "dtype": "float32",
        }

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return encode_text(text, self.tokenizer, add_special_tokens=add_special_tokens)

    async def decode_tokens(self, tokens) -> str:
        return self.tokenizer.decode(tokens)

    async def encode_chat(self, messages, options, *, add_special_tokens=False) -> list[int]:
        self.chats.append((messages, dict(options)))
        text = render_chat(messages, self.tokenizer, options)
        return encode_text(text, self.tokenizer, add_special_tokens=add_special_tokens)

    async def compile_grammar(self, grammar) -> CompiledGrammar:
        return self.grammars.compile(grammar)

    def sequence(self, prompt, params, kept=None, rules=(), **options) -> Decoded:
        self.kept = kept
        if len(prompt) + params.max_new_tokens > self.limits.context:
            raise ContextLengthError("it does not fit.")
        made = [make(self.tokenizer, params) for make in rules]
        return Decoded(prompt, params, stop_rules=made, eos=(EOS,), **options)

    def submit(self, sequences: Sequence[Decoded], *, client: str) -> FakeStream:
        if self.refuse is not None:
            raise self.refuse
        self.sequences += sequences
        self.clients.append(client)
        # Choices take turns, as sequences of one engine do.
        each = [self._outputs(sequence) for sequence in sequences]
        longest = max(map(len, each))
        outputs = [own[turn] for turn in range(longest) for own in each if turn < len(own)]
        stream = FakeStream(outputs, self.held, self.held_at)
        self.streams.append(stream)
        return stream

    def _outputs(self, sequence: Decoded) -> list[SequenceOutput]:
        if self.fail_at_once is not None:
            return [SequenceOutput(sequence, (), 0, 0, None, error=self.fail_at_once)]
        sequence.cached = 2 + sequence.index
        if (top := sequence.params.prompt_logprobs) is not None:
            scores = _scores(sequence.prompt[1:], top) or ()
            sequence.prompt_scores = [None, *(replace(score, rank=1) for score in scores)]
        tokens, reason = self._cut(sequence)
        outputs: list[SequenceOutput] = []
        done = 0
        for cycle, block in enumerate([tokens[:1], *_blocks(tokens[1:])]):
            accepted = max(0, min(BLOCK - 1, len(block))) if cycle else 0
            if cycle:
                sequence.stats.record(drafts=DRAFTS, accepted=accepted, committed=len(block))
            done += len(block)
            outputs.append(
                SequenceOutput(
                    sequence,
                    tuple(block),
                    accepted,
                    cycle,
                    reason if done == len(tokens) else None,
                    scores=_scores(block, sequence.params.logprobs),
                )
            )
        error = self.fail(sequence.index)
        if error is not None:
            return [outputs[0], SequenceOutput(sequence, (), 0, 1, None, error=error)]
        return outputs

    def _cut(self, sequence: Decoded) -> tuple[list[int], str]:
        said = self.tokens
        if said is None:
            said = [*self.tokenizer(self.text)["input_ids"], EOS]
        text, found = TextStream.of(self.tokenizer, sequence.params, kept=self.kept), []
        for token in said:
            found.append(token)
            text.push(token)
            sequence.output.append(token)
            if text.stopped or any(rule(sequence) for rule in sequence.stop_rules):
                return found, "stop"
            if token == EOS and not sequence.params.ignore_eos:
                return found, "eos"
            if len(found) == sequence.params.max_new_tokens:
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
