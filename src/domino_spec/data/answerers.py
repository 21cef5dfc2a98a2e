"""Who answers prompts: the target itself, here or on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import Prompt, check_prompt, encode_prompt
from domino_spec.data.generation import finish, make_sequence
from domino_spec.data.messages import Message
from domino_spec.data.turns import Turn, find_turn
from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.errors import DataError, InputError


@dataclass(frozen=True)
class Request:
    """A chat whose next turn is the assistant's, and how it is drawn."""

    messages: list[Message]
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """Token ids of prompt and answer, or why there is none."""

    prompt: list[int]
    tokens: list[int]
    text: str
    finished: bool
    """Whether the target ended it; otherwise it was cut."""
    refused: str = ""

    @classmethod
    def none(cls, reason: str) -> Answer:
        """A prompt that cannot be answered."""
        return cls([], [], "", False, reason)


OnAnswers = Callable[[Sequence[Answer]], None]
"""Told what has just been answered."""


class Answerer(Protocol):
    """Answers requests, in their order, however it groups them."""

    def answer(self, requests: Sequence[Request], on_answers: OnAnswers) -> list[Answer]:
        """All answers."""

    def prompt_tokens(self, messages: list[Message]) -> int:
        """How long a prompt is."""


class LocalAnswerer:
    """The target on this machine."""

    def __init__(self, decoder: DominoDecoder, *, batch_size: int = 32) -> None:
        """`batch_size` is for targets that the engine cannot run."""
        if batch_size < 1:
            raise DataError(f"batch_size is {batch_size}; expected 1 or more.")
        if decoder.tokenizer is None:
            raise DataError("the target came without a tokenizer, so it cannot read prompts.")
        self.decoder = decoder
        self._tokenizer: Any = decoder.tokenizer
        self.batch_size = 1 if decoder.target.batch_refusal else batch_size
        self._is_chat = bool(getattr(self._tokenizer, "chat_template", None))
        self._turn = Turn("", frozenset(), "")
        if self._is_chat:
            self._turn = find_turn(self._tokenizer, "assistant", decoder.chat_options)

    def prompt_tokens(self, messages: list[Message]) -> int:
        """How long a prompt is."""
        return len(self._encode(messages))

    def answer(self, requests: Sequence[Request], on_answers: OnAnswers) -> list[Answer]:
        """All at once: the engine's scheduler orders them and keeps its batch full."""
        answers: list[Answer | None] = [None] * len(requests)
        sequences = []
        for index, request in enumerate(requests):
            try:
                tokens = self._encode(request.messages)
                check_prompt(tokens, request.params.max_new_tokens, self.decoder.target)
            except InputError as error:
                answers[index] = Answer.none(_reason(error))
                continue
            sequences.append(
                make_sequence(
                    self.decoder,
                    tokens,
                    request.params,
                    index=index,
                    end_ids=self._turn.end_ids,
                    end_text=self._turn.end_text,
                )
            )
        # The longest first: memory that does not suffice shows at once.
        sequences.sort(key=lambda sequence: -len(sequence.prompt))
        for batch in self._batches(sequences):
            for sequence in finish(self.decoder, batch):
                text = self._text(sequence.output)
                whole = sequence.finish_reason != "length"
                answer = Answer(sequence.prompt, sequence.output, text, whole)
                answers[sequence.index] = answer
                on_answers([answer])
        return [answer for answer in answers if answer is not None]

    def _batches(self, sequences: list[Decoded]) -> Iterator[list[Decoded]]:
        """All for the engine; for the reference loop, which pads, as many as fit together."""
        engine = self.decoder.unsupported_reason() is None
        size = len(sequences) if engine else self.batch_size
        for start in range(0, len(sequences), max(size, 1)):
            yield sequences[start : start + size]

    def _encode(self, messages: list[Message]) -> list[int]:
        prompt: Prompt = messages if self._is_chat else str(messages[-1]["content"])
        return encode_prompt(prompt, self._tokenizer, self.decoder.chat_options)

    def _text(self, tokens: list[int]) -> str:
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        end = self._turn.end_text
        return text.split(end)[0] if end else text


def _reason(error: InputError) -> str:
    text = str(error)
    if "context" in text:
        return "its prompt and answer would not fit into the target's context"
    return text if len(text) <= 100 else f"{text[:97]}..."
