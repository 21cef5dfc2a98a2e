"""Chats as the target's own template writes them, and which tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from domino_spec.data.examples import BoolArray
from domino_spec.data.messages import Message
from domino_spec.data.report import BadRow
from domino_spec.errors import DataError

CUT = "length"
"""The finish_reason of an answer that was cut: the target did not end it."""


@dataclass(frozen=True)
class EncodedChat:
    """Token ids up to the last learnt one."""

    tokens: list[int]
    supervised: BoolArray
    unlearnt_turns: int = 0
    """Assistant turns that stand in the history in another form than they were written in."""


class ChatEncoder:
    """Finds the assistant's tokens in any chat template.

    A template that marks them ({% generation %}) is believed. For others a turn is what its
    rendering adds to the generation prompt before it. That holds only where both are the
    beginning of the whole rendering: a template that strips thinking from earlier turns breaks
    it for those, and then they are history to the last turn, which is learnt.
    """

    def __init__(self, tokenizer: Any, chat_options: Mapping[str, Any] | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            raise DataError(
                "the data are chats but the target's tokenizer has no chat template; set "
                "tokenizer.chat_template or give texts."
            )
        self._tokenizer = tokenizer
        self._options = dict(chat_options or {})
        self._is_marked = "generation %}" in str(template) or "generation -%}" in str(template)
        self._special = special_ids(tokenizer)

    def without_end(self, chat: EncodedChat) -> EncodedChat:
        """A chat whose last answer was cut: the end of turn is the template's, not the target's."""
        end = len(chat.tokens)
        while end and chat.tokens[end - 1] in self._special:
            end -= 1
        return EncodedChat(chat.tokens[:end], chat.supervised[:end], chat.unlearnt_turns)

    def render(self, messages: list[Message], *, open_turn: bool = False) -> str:
        """The template's text; `open_turn` adds the assistant's opening."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_turn, **self._options
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise BadRow(_refusal(error)) from error
        return text

    def encode(self, messages: list[Message]) -> EncodedChat:
        """Token ids of a chat that ends in an assistant turn, and those to learn."""
        encoded = self._by_marks(messages) if self._is_marked else None
        return encoded or self._by_prefixes(messages)

    def _by_marks(self, messages: list[Message]) -> EncodedChat | None:
        try:
            output = self._tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._options,
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise BadRow(_refusal(error)) from error
        tokens = [int(token) for token in output["input_ids"]]
        supervised = np.array(output["assistant_masks"], dtype=np.bool_)
        if not supervised.any():
            return None
        ends = np.flatnonzero(supervised[:-1] & ~supervised[1:])
        for end in ends:  # the end-of-turn token, where the marks leave it out
            if tokens[end] not in self._special and tokens[end + 1] in self._special:
                supervised[end + 1] = True
        return _trimmed(tokens, supervised)

    def _by_prefixes(self, messages: list[Message]) -> EncodedChat:
        whole = self.render(messages)
        spans, unlearnt = [], 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opening = self.render(messages[:index], open_turn=True)
            turn = self.render(messages[: index + 1]) if index + 1 < len(messages) else whole
            if whole.startswith(turn) and turn.startswith(opening) and len(turn) > len(opening):
                spans.append((len(opening), len(turn)))
            else:
                unlearnt += 1
        if not spans:
            raise BadRow("the chat template rewrites its turns, so none can be told from the rest")
        tokens, borders = self._tokenize(whole, [place for span in spans for place in span])
        supervised = np.zeros(len(tokens), dtype=np.bool_)
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            supervised[first : self._turn_end(tokens, first, last)] = True
        return _trimmed(tokens, supervised, unlearnt)

    def _tokenize(self, text: str, places: list[int]) -> tuple[list[int], list[int]]:
        """Token ids, and for each place in the text how many tokens end there or before."""
        if getattr(self._tokenizer, "is_fast", False):
            output = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            # Of a token across a place the start counts as the prompt's, which is all it can be.
            ends = np.maximum.accumulate([end for _, end in output["offset_mapping"]] or [0])
            starts = [start for start, _ in output["offset_mapping"]]
            counts = []
            for place in places:
                count = int(np.searchsorted(ends, place, side="right"))
                if count < len(starts) and starts[count] < place:
                    count += 1
                counts.append(count)
            return [int(token) for token in output["input_ids"]], counts
        tokens = self._ids(text)
        return tokens, [_common(tokens, self._ids(text[:place])) for place in places]

    def _ids(self, text: str) -> list[int]:
        return [
            int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ]

    def _turn_end(self, tokens: list[int], first: int, last: int) -> int:
        """Behind the end-of-turn token: what the template adds after it nobody generates."""
        for place in range(last, first, -1):
            if tokens[place - 1] in self._special:
                return place
        return last


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that text cannot spell: they end turns."""
    ids = {int(token) for token in getattr(tokenizer, "all_special_ids", ())}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(ids | {int(i) for i, token in added.items() if token.special})


def _trimmed(tokens: list[int], supervised: BoolArray, unlearnt: int = 0) -> EncodedChat:
    end = len(tokens) - int(supervised[::-1].argmax()) if supervised.any() else len(tokens)
    return EncodedChat(tokens[:end], supervised[:end], unlearnt)


def _refusal(error: Exception) -> str:
    line = " ".join(str(error).split())
    return f"the chat template does not take it ({line[:80] or type(error).__name__})"


def _common(tokens: list[int], prefix: list[int]) -> int:
    count = 0
    for ours, theirs in zip(tokens, prefix, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
