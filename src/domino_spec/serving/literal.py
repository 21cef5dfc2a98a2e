"""Chats whose messages are text and nothing else, whatever their authors typed.

A tokenizer reads `<|im_end|>` in a message as the sign that ends a turn, so that who writes a
message could write the turns behind it too. Here such a name is cut behind its first character
before the template sees it, and the pieces are encoded one by one: the model reads the characters.
Tokenizers have a switch for this, but it would turn off the template's own signs as well, and it
belongs to the whole tokenizer, which several threads use. A chat without such names is encoded as
it always was.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from domino_spec.api.prompts import encode_prompt, render_chat


class LiteralChats:
    """Encodes chats with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = sorted(_signs(tokenizer), key=len, reverse=True)
        any_of = "|".join(map(re.escape, names))
        self._sign = re.compile(any_of) if names else None
        self._places = re.compile(f"(?={any_of})")  # of names inside other names too

    def encode(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        """A prompt in which only the template's own signs are signs."""
        if self._sign is None or not self._has_signs([*messages, options]):
            return encode_prompt(list(messages), self._tokenizer, options)
        # Neither case nor white space, which templates change, and nothing that can be guessed.
        cut = f"\ufdd0{secrets.randbelow(10**18)}\ufdd1"
        text = render_chat(
            [self._cut(message, cut) for message in messages],
            self._tokenizer,
            {name: self._cut(value, cut) for name, value in options.items()},
        )
        pieces = [piece for piece in text.split(cut) if piece]
        encoded = [self._tokenizer(piece, add_special_tokens=False) for piece in pieces]
        return [int(token) for each in encoded for token in each["input_ids"]]

    def _has_signs(self, value: Any) -> bool:
        if isinstance(value, str):
            assert self._sign is not None
            return self._sign.search(value) is not None
        if isinstance(value, Mapping):
            return any(self._has_signs(each) for each in value.values())
        return isinstance(value, Sequence) and any(self._has_signs(each) for each in value)

    def _cut(self, value: Any, cut: str) -> Any:
        """The same with every name in two."""
        if isinstance(value, str):
            behind = [match.start() + 1 for match in self._places.finditer(value)]
            return cut.join(value[i:j] for i, j in pairwise([0, *behind, len(value)]))
        if isinstance(value, Mapping):
            return {name: self._cut(each, cut) for name, each in value.items()}
        if isinstance(value, Sequence):
            return [self._cut(each, cut) for each in value]
        return value


def _signs(tokenizer: Any) -> set[str]:
    """Names of special tokens; of other added ones, such as <think>, templates make use."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    names = {str(entry.content) for entry in added.values() if entry.special}
    names |= {str(name) for name in getattr(tokenizer, "all_special_tokens", None) or ()}
    return {name for name in names if len(name) > 1}
