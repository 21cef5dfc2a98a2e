"""Turns committed tokens into text piece by piece, never showing half a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec.decoding.params import SamplingParams

_UNFINISHED = "\ufffd"


class TextStream:
    """Incremental detokenisation that ends before a stop string and never shows part of one."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        kept: Mapping[int, str] | None = None,
    ) -> None:
        """A stop string that ends within the first `min_tokens` tokens does not count.

        `kept` are special tokens that are part of the text in any case, with their names.
        """
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._skip = skip_special_tokens
        self._kept = kept or {}
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

    @classmethod
    def of(
        cls, tokenizer: Any, params: SamplingParams, *, kept: Mapping[int, str] | None = None
    ) -> TextStream:
        """The text of a sequence with these parameters."""
        return cls(tokenizer, params.stop, kept=kept, **text_options(params))

    def push(self, *tokens: int) -> str:
        """The text that these tokens complete, which may be none yet."""
        early = self._min_tokens - len(self._tokens)
        if 0 < early < len(tokens):
            return self.push(*tokens[:early]) + self.push(*tokens[early:])
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
        text = self._cut(self._held + after[len(before) :])
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        cut = self._cut(text)
        if self.stopped:
            return cut
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _cut(self, text: str) -> str:
        if len(self._tokens) <= self._min_tokens:
            return text
        found = []
        for stop in self._stops:
            # One that ended in what is held back ended too early to count.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop)))
        if not found:
            return text
        self.stopped = True
        return text[: min(found)[int(self._include_stop)]]

    def _decode(self, tokens: Sequence[int]) -> str:
        if not self._kept or self._kept.keys().isdisjoint(tokens):
            return self._decode_plain(tokens)
        parts, start = [], 0
        for at, token in enumerate(tokens):
            if token in self._kept:
                parts += [self._decode_plain(tokens[start:at]), self._kept[token]]
                start = at + 1
        return "".join([*parts, self._decode_plain(tokens[start:])])

    def _decode_plain(self, tokens: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=self._skip))
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))


def text_options(params: SamplingParams) -> dict[str, Any]:
    """Options of a `TextStream`, or `at_strings`, by a sequence's parameters."""
    return {
        "min_tokens": params.min_tokens,
        "include_stop": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
    }


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could be the start of the stop string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
