"""What a single token is called, and the bytes it stands for."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def _byte_letters() -> dict[str, int]:
    """Byte-level tokenizers write a byte as itself where it can be seen, else as a letter."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(256 + number): byte for number, byte in enumerate(unseen)}


_LETTERS = _byte_letters()


class TokenNames:
    """Names and bytes of a tokenizer's tokens, one by one.

    Half a character is no text, but its bytes are known wherever the tokenizer works on bytes;
    elsewhere a token is what it decodes to by itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self._added = {int(token): str(entry.content) for token, entry in added.items()}
        self._special = {int(token) for token in getattr(tokenizer, "all_special_ids", ())}
        self._special |= {int(token) for token, entry in added.items() if entry.special}
        decoder = _decoder(tokenizer)
        self._byte_level = "ByteLevel" in decoder
        self._spaced = _SPACE in decoder or "Metaspace" in decoder
        self._known: dict[int, bytes] = {}

    def special(self, token: int) -> bool:
        """Whether it is no text but a sign to the model."""
        return token in self._special

    def raw(self, token: int) -> bytes:
        """Its bytes; a special token's are its name."""
        if token not in self._known:
            self._known[token] = self._raw(token)
        return self._known[token]

    def name(self, token: int) -> str:
        """Its text; bytes that are no text by themselves are written as \\xNN."""
        return self.raw(token).decode("utf-8", errors="backslashreplace")

    def _raw(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""  # a model may have more ids than its tokenizer
        if self._byte_level and all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if self._spaced:
            return str(name).replace(_SPACE, " ").encode()
        return str(self.tokenizer.decode([token])).encode()


def _decoder(tokenizer: Any) -> str:
    """How tokens become text, as the tokenizer's file says it; empty if it has none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return ""
    state = decoder.__getstate__()
    return state.decode("utf-8") if isinstance(state, bytes) else str(state)
