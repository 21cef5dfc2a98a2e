"""Turns committed tokens into text piece by piece, never showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"


class TextStream:
    """Incremental detokenisation that ends before a stop string and never shows part of one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        # The wrapper around the Rust tokenizer takes several times as long as the tokenizer.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if getattr(tokenizer, "clean_up_tokenization_spaces", True):
            self._backend = None
        self._stops = list(stops)
        self._tokens: list[int] = []
        # Tokens before `_shown_from` give context for spacing; text up to `_shown_to` is out.
        self._shown_from = 0
        self._shown_to = 0
        self._held = ""
        self.stopped = False

    def push(self, *tokens: int) -> str:
        """The text that these tokens complete, which may be none yet."""
        self._tokens += tokens
        if self.stopped or not tokens:
            return ""
        before = self._decode(self._tokens[self._shown_from : self._shown_to])
        after = self._decode(self._tokens[self._shown_from :])
        if after.endswith(_UNFINISHED) and len(tokens) > 1:  # all but the last may be whole
            del self._tokens[-len(tokens) :]
            return "".join(self.push(token) for token in tokens)
        if len(after) <= len(before) or after.endswith(_UNFINISHED):
            return ""
        self._shown_from, self._shown_to = self._shown_to, len(self._tokens)
        return self._release(self._held + after[len(before) :])

    def finish(self) -> str:
        """What was still held back when the sequence ended."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._shown_from : self._shown_to])
        after = self._decode(self._tokens[self._shown_from :])
        self._shown_to = len(self._tokens)
        text, self._held = self._held + after[len(before) :], ""
        return self._cut(text)

    def _release(self, text: str) -> str:
        cut = self._cut(text)
        if self.stopped:
            return cut
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _cut(self, text: str) -> str:
        found = [text.index(stop) for stop in self._stops if stop in text]
        if not found:
            return text
        self.stopped = True
        return text[: min(found)]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=True))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could be the start of the stop string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
