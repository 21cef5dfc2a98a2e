"""The two shapes of replies, for chats and for plain prompts: the rest of the server is one."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec import __version__
from domino_spec.serving.http.answered import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    Finish,
    TextChunk,
    TextLogprobs,
    TextReply,
    Usage,
)
from domino_spec.serving.http.choices import Choice, Piece, Scored, finite
from domino_spec.serving.http.pieces import TokenNames

FINGERPRINT = f"domino-spec-{__version__}"
Chunk = Mapping[str, Any]


class Form(ABC):
    """How a reply is written, whole or in chunks."""

    prefix: str
    prompt: str
    """The parameter that holds what is answered."""

    def __init__(self, model: str, names: TokenNames, *, show_usage: bool) -> None:
        self.model = model
        self.names = names
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._show_usage = show_usage

    @abstractmethod
    def opening(self, choice: Choice) -> Chunk | None:
        """What comes before an answer's first text."""

    @abstractmethod
    def delta(self, choice: Choice, piece: Piece) -> Chunk:
        """A piece of an answer."""

    @abstractmethod
    def closing(self, choice: Choice) -> Chunk:
        """Why an answer ended."""

    @abstractmethod
    def counts(self, usage: Usage) -> Chunk:
        """The last chunk of a stream whose client counts."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> Mapping[str, Any]:
        """All answers at once."""


class ChatForm(Form):
    """chat.completion and its chunks."""

    prefix = "chatcmpl"
    prompt = "messages"

    def opening(self, choice: Choice) -> ChatChunk:
        """The role."""
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: Choice, piece: Piece) -> ChatChunk:
        """Content."""
        logprobs = None if choice.scores is None else self._logprobs(piece.scored)
        chunk = self._chunk(choice, {"content": piece.text}, logprobs)
        if piece.domino is not None:
            chunk["domino"] = piece.domino
        return chunk

    def closing(self, choice: Choice) -> ChatChunk:
        """The reason."""
        return self._chunk(choice, {}, finish=choice.finish)

    def counts(self, usage: Usage) -> ChatChunk:
        """No choices, and the usage."""
        return {**self._base(), "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatReply:
        """A chat.completion."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None if choice.scores is None else self._logprobs(choice.scored),
                    "finish_reason": choice.finish or "stop",
                }
                for choice in choices
            ],
            "usage": usage,
        }

    def _base(self) -> ChatChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [],
        }

    def _chunk(
        self,
        choice: Choice,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish: Finish | None = None,
    ) -> ChatChunk:
        chosen: ChatChunkChoice = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        chunk = self._base()
        chunk["choices"].append(chosen)
        if self._show_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, scored: Sequence[Scored]) -> ChatLogprobs:
        names = self.names
        return {
            "content": [
                {
                    "token": names.name(each.token),
                    "logprob": finite(each.logprob),
                    "bytes": list(names.raw(each.token)),
                    "top_logprobs": [
                        {
                            "token": names.name(token),
                            "logprob": finite(logprob),
                            "bytes": list(names.raw(token)),
                        }
                        for token, logprob in each.top
                    ],
                }
                for each in scored
            ],
            "refusal": None,
        }


class TextForm(Form):
    """text_completion, whole and in chunks."""

    prefix = "cmpl"
    prompt = "prompt"

    def opening(self, choice: Choice) -> None:
        """A text has no role."""

    def delta(self, choice: Choice, piece: Piece) -> TextChunk:
        """Text."""
        logprobs = None if choice.scores is None else self._logprobs(piece.scored)
        chunk = self._chunk(choice, piece.text, logprobs)
        if piece.domino is not None:
            chunk["domino"] = piece.domino
        return chunk

    def closing(self, choice: Choice) -> TextChunk:
        """The reason."""
        return self._chunk(choice, "", finish=choice.finish)

    def counts(self, usage: Usage) -> TextChunk:
        """No choices, and the usage."""
        return {**self._base(), "usage": usage}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> TextReply:
        """A text_completion."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": None if choice.scores is None else self._logprobs(choice.scored),
                    "finish_reason": choice.finish or "stop",
                }
                for choice in choices
            ],
            "usage": usage,
        }

    def _base(self) -> TextChunk:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [],
        }

    def _chunk(
        self,
        choice: Choice,
        text: str,
        logprobs: TextLogprobs | None = None,
        finish: Finish | None = None,
    ) -> TextChunk:
        chunk = self._base()
        chunk["choices"].append(
            {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        )
        if self._show_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, scored: Sequence[Scored]) -> TextLogprobs:
        name = self.names.name
        return {
            "tokens": [name(each.token) for each in scored],
            "token_logprobs": [finite(each.logprob) for each in scored],
            "top_logprobs": [self._top(each) for each in scored],
            "text_offset": [each.start for each in scored],
        }

    def _top(self, each: Scored) -> dict[str, float]:
        """By name, the likeliest first; the token itself is always among them."""
        found: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(self.names.name(token), finite(logprob))
        return found
