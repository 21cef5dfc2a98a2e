"""Chat prompts in which messages are plain text, and the text and bytes of single tokens."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from domino_spec.api.prompts import encode_text, encode_texts, render_chat, require_tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_SHORT, _LONG = 4_000, 200_000
"""Characters: shorter prompts are encoded in the event loop, longer ones in a thread, long ones in
turn."""
_MESSAGE = 32
"""Characters that a template adds to a message, roughly: many empty ones are long too."""


class PromptEncoder:
    """Encodes prompts of requests that come at the same time together.

    A tokenizer works without the GIL and on several texts at once: what arrived in one pass of the
    event loop takes little longer than its longest text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chats = ChatEncoder(tokenizer)
        self._waiting: dict[bool, list[tuple[list[str], asyncio.Future[list[int]]]]] = {
            True: [],
            False: [],
        }
        """Pieces of prompts, by whether the tokenizer adds special tokens."""
        self._long = asyncio.Semaphore(1)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, as the tokenizer begins one."""
        if len(text) <= _SHORT:
            return await self._encode_soon([text], add_special_tokens=add_special_tokens)
        encode = partial(encode_text, add_special_tokens=add_special_tokens)
        return await self._in_thread(len(text), encode, text, require_tokenizer(self._tokenizer))

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        decode = require_tokenizer(self._tokenizer).decode
        if len(tokens) <= _SHORT:
            return str(decode(tokens))
        return str(await asyncio.to_thread(decode, tokens))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Messages through the target's chat template."""
        size = len(messages) * _MESSAGE + sum(len(message["content"]) for message in messages)
        size += len(str(template_kwargs)) if template_kwargs else 0
        if size <= _SHORT and not add_special_tokens:
            pieces = self._chats.render(messages, template_kwargs)
            return await self._encode_soon(pieces, add_special_tokens=False)
        encode = partial(self._chats.encode, add_special_tokens=add_special_tokens)
        return await self._in_thread(size, encode, messages, template_kwargs)

    async def _in_thread(
        self, size: int, encode: Callable[..., list[int]], *given: Any
    ) -> list[int]:
        if size <= _LONG:
            return await asyncio.to_thread(encode, *given)
        async with self._long:  # each takes seconds and a hundred times its own size
            return await asyncio.to_thread(encode, *given)

    async def _encode_soon(self, pieces: list[str], *, add_special_tokens: bool) -> list[int]:
        """After what else this pass of the event loop brings, together with that."""
        loop = asyncio.get_running_loop()
        if not self._waiting[add_special_tokens]:
            loop.call_soon(self._encode_waiting, add_special_tokens)
        ids: asyncio.Future[list[int]] = loop.create_future()
        self._waiting[add_special_tokens].append((pieces, ids))
        return await ids

    def _encode_waiting(self, add_special_tokens: bool) -> None:
        waiting, self._waiting[add_special_tokens] = self._waiting[add_special_tokens], []
        texts = [piece for pieces, _ in waiting for piece in pieces]
        try:
            found = iter(
                encode_texts(texts, self._tokenizer, add_special_tokens=add_special_tokens)
            )
        except Exception as error:
            if len(waiting) > 1:  # one text's error is not its neighbours'
                for one in waiting:
                    self._waiting[add_special_tokens] = [one]
                    self._encode_waiting(add_special_tokens)
            elif not waiting[0][1].done():
                waiting[0][1].set_exception(error)
            return
        for pieces, ids in waiting:
            own = [token for _ in pieces for token in next(found)]
            if not ids.done():  # its request may have been cancelled
                ids.set_result(own)


class ChatEncoder:
    """Encodes chats so that only the template writes special tokens.

    A tokenizer reads `<|im_end|>` in a message as the token that ends a turn, so that the author of
    a message could forge the following turns. Such a name is cut after its first character before
    the template sees it, and the pieces are encoded one by one: the model reads the characters. A
    tokenizer's own switch for this would turn off the template's special tokens too, and belongs
    to the whole tokenizer, which several threads use. Other chats are encoded as usual.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = sorted(_special_names(tokenizer), key=len, reverse=True)
        any_of = "|".join(map(re.escape, names))
        self._special = re.compile(any_of) if names else None
        self._positions = re.compile(f"(?={any_of})")  # of names inside other names too

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of the rendered chat; the tokenizer's own special tokens begin it, if any."""
        first, *rest = self.render(messages, template_kwargs) or [""]
        found = encode_texts([first], self._tokenizer, add_special_tokens=add_special_tokens)
        found += encode_texts(rest, self._tokenizer, add_special_tokens=False) if rest else []
        return [token for ids in found for token in ids]

    def render(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
    ) -> list[str]:
        """The rendered chat, in pieces that are to be encoded one by one."""
        if self._special is None or not self._has_special([*messages, template_kwargs]):
            return [render_chat(messages, self._tokenizer, template_kwargs)]
        # Neither case nor white space, which templates change, and nothing that can be guessed.
        cut = f"\ufdd0{secrets.randbelow(10**18)}\ufdd1"
        text = render_chat(
            [self._split(message, cut) for message in messages],
            self._tokenizer,
            {name: self._split(value, cut) for name, value in template_kwargs.items()},
        )
        return [piece for piece in text.split(cut) if piece]

    def _has_special(self, value: Any) -> bool:
        if isinstance(value, str):
            assert self._special is not None
            return self._special.search(value) is not None
        if isinstance(value, Mapping):
            return any(self._has_special(each) for each in value.values())
        return isinstance(value, Sequence) and any(self._has_special(each) for each in value)

    def _split(self, value: Any, cut: str) -> Any:
        """The same with `cut` inside every name of a special token."""
        if isinstance(value, str):
            inside = [match.start() + 1 for match in self._positions.finditer(value)]
            return cut.join(value[i:j] for i, j in pairwise([0, *inside, len(value)]))
        if isinstance(value, Mapping):
            return {name: self._split(each, cut) for name, each in value.items()}
        if isinstance(value, Sequence):
            return [self._split(each, cut) for each in value]
        return value


def _special_names(tokenizer: Any) -> set[str]:
    """Names of special tokens; other added ones, such as <think>, belong to templates' text."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    names = {str(entry.content) for entry in added.values() if entry.special}
    names |= {str(name) for name in getattr(tokenizer, "all_special_tokens", None) or ()}
    return {name for name in names if len(name) > 1}


_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""How byte-level tokenizers write bytes."""


class TokenTexts:
    """Text and bytes of a tokenizer's tokens, one by one.

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
        self._bytes: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        """Whether it is no part of the text."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """Its bytes; a special token's are its name."""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def text_of(self, *tokens: int) -> str:
        """Their text; bytes that are no text by themselves are written as \\xNN."""
        whole = b"".join(map(self.bytes_of, tokens))
        return whole.decode("utf-8", errors="backslashreplace")

    def _find_bytes(self, token: int) -> bytes:
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
