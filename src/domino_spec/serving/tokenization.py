"""Chat prompts in which messages are plain text, and the text and bytes of single tokens."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from domino_spec.api.images import ImageTokensError, encode_image_chat
from domino_spec.api.prompts import encode_texts, render_chat, require_tokenizer
from domino_spec.engine.scheduler import FairQueue
from domino_spec.errors import InputError
from domino_spec.serving.errors import ContextLengthError, QueueFullError

_T = TypeVar("_T")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that never are characters: no text of a token has them."""
_SHORT = 4_000
"""Characters: shorter prompts are encoded together and wait for no long one."""
_MESSAGE = 32
"""Characters that a template adds to a message, roughly: many empty ones are long too."""
_SLICE = 256
"""Pieces of a long prompt in one call: short prompts share the tokenizer's threads with it."""
_WAITING_CHARACTERS = 64 * 1024 * 1024
"""Of long prompts that wait, all together: they wait in memory."""
_WAITING_SHORT = 4096
"""Short prompts that wait."""
_CHARACTERS_PER_SECOND = 1e6
"""Of one text on one core, roughly; what is told to clients for whom there is no room."""


class PromptEncoder:
    """Encodes prompts in two threads of its own, never in the event loop.

    One takes all short prompts that have come together: a tokenizer works without the GIL and on
    several texts at once. The other takes long ones, one after the other and fairly between
    clients. A prompt whose request was cancelled while it waited is not encoded.
    """

    def __init__(self, tokenizer: Any, *, max_tokens: int | None = None) -> None:
        """`max_tokens` of a prompt: what surely has more is refused before it is encoded."""
        self._tokenizer = tokenizer
        self._chats = ChatEncoder(tokenizer)
        self._max_tokens = max_tokens
        self._bound = TokenBound(tokenizer)
        self._short: list[tuple[list[str], bool, asyncio.Future[list[int]]]] = []
        self._short_running = self._long_running = False
        self._long: FairQueue[_LongPrompt] = FairQueue()
        self._long_characters = 0
        """Of the prompts in the queue."""
        self._short_thread = ThreadPoolExecutor(1, "domino-encode-short")
        self._long_thread = ThreadPoolExecutor(1, "domino-encode-long")

    async def encode_text(
        self, text: str, *, add_special_tokens: bool = True, client: str = ""
    ) -> list[int]:
        """A text's tokens, as the tokenizer begins one."""
        require_tokenizer(self._tokenizer)
        if len(text) <= _SHORT:
            return await self._encode_short([text], add_special_tokens=add_special_tokens)
        encode = partial(self._encode, [text], add_special_tokens)
        return await self._encode_long(len(text), encode, client)

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
        client: str = "",
    ) -> list[int]:
        """Messages through the target's chat template."""
        size = _size_of([*messages, template_kwargs]) + len(messages) * _MESSAGE
        if size <= _SHORT and not add_special_tokens:
            pieces = self._chats.render(messages, template_kwargs)
            return await self._encode_short(pieces, add_special_tokens=False)

        def encode() -> list[int]:
            first, *rest = self._chats.render(messages, template_kwargs) or [""]
            self._refuse_long([first, *rest])
            found = self._encode([first], add_special_tokens)
            return found + self._encode(rest, False)

        return await self._encode_long(size, encode, client)

    async def encode_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        *,
        processor: Callable[[], Any],
        max_bytes: int,
        max_pixels: int,
        client: str = "",
    ) -> tuple[list[int], dict[str, Any]]:
        """Messages whose images are files in base64, and what else the target's prefill takes.

        A processor encodes the whole text at once, so that names of special tokens in it are
        refused here.
        """

        def encode() -> tuple[list[int], dict[str, Any]]:
            self._chats.refuse_special(messages, template_kwargs)
            opened = [_with_files(message, max_bytes) for message in messages]
            try:
                return encode_image_chat(
                    opened,
                    processor(),
                    self._tokenizer,
                    template_kwargs,
                    max_pixels=max_pixels,
                    max_tokens=self._max_tokens,
                )
            except ImageTokensError as error:
                raise ContextLengthError(str(error)) from error

        size = _size_of([*messages, template_kwargs]) + len(messages) * _MESSAGE
        return await self._encode_long(size, encode, client)

    def close(self) -> None:
        """End the threads, once what they do is done."""
        self._short_thread.shutdown(cancel_futures=True)
        self._long_thread.shutdown(cancel_futures=True)

    # Short prompts ------------------------------------------------------------------------------

    async def _encode_short(self, pieces: list[str], *, add_special_tokens: bool) -> list[int]:
        if len(self._short) >= _WAITING_SHORT:
            raise QueueFullError(
                f"{len(self._short)} prompts wait to be tokenised already; come back later.",
                retry_after=1,
            )
        loop = asyncio.get_running_loop()
        ids: asyncio.Future[list[int]] = loop.create_future()
        self._short.append((pieces, add_special_tokens, ids))
        if not self._short_running:  # after what else this pass of the event loop brings
            self._short_running = True
            loop.call_soon(self._run_short, loop)
        return await ids

    def _run_short(self, loop: asyncio.AbstractEventLoop) -> None:
        """Encode what waits; what comes meanwhile is encoded after it, together again."""
        waiting = [each for each in self._short if not each[2].done()]
        self._short.clear()
        self._short_running = bool(waiting)
        if not waiting:
            return
        work = [(pieces, special) for pieces, special, _ in waiting]
        running = loop.run_in_executor(self._short_thread, self._encode_together, work)

        def finish(done: asyncio.Future[list[list[int] | Exception]]) -> None:
            for (_, _, ids), found in zip(waiting, done.result(), strict=True):
                _resolve(ids, found)
            self._run_short(loop)

        running.add_done_callback(finish)

    def _encode_together(
        self, prompts: Sequence[tuple[list[str], bool]]
    ) -> list[list[int] | Exception]:
        found: list[list[int] | Exception] = [[]] * len(prompts)
        for special in (True, False):
            places = [place for place, given in enumerate(prompts) if given[1] is special]
            texts = [piece for place in places for piece in prompts[place][0]]
            try:
                encoded = iter(self._encode_pieces(texts, special) if texts else ())
                for place in places:
                    found[place] = [token for _ in prompts[place][0] for token in next(encoded)]
            except Exception as error:
                if len(prompts) == 1:
                    return [error]
                for place in places:  # one prompt's error is not its neighbours'
                    found[place : place + 1] = self._encode_together([prompts[place]])
        return found

    # Long prompts -------------------------------------------------------------------------------

    async def _encode_long(self, size: int, encode: Callable[[], _T], client: str) -> _T:
        if self._long_characters + size > max(_WAITING_CHARACTERS, size):
            raise QueueFullError(
                f"prompts of {self._long_characters} characters wait to be tokenised already; come "
                "back later.",
                retry_after=self._long_characters / _CHARACTERS_PER_SECOND,
            )
        loop = asyncio.get_running_loop()
        prompt = _LongPrompt(encode, size, loop.create_future())
        self._long.put(prompt, client=client, cost=size)
        self._long_characters += size
        if not self._long_running:
            self._run_long(loop)
        try:
            found: _T = await prompt.ids
            return found
        finally:
            if self._long.remove(prompt):  # its client left while it waited
                self._long_characters -= size

    def _run_long(self, loop: asyncio.AbstractEventLoop) -> None:
        prompt = self._long.take()
        self._long_running = prompt is not None
        if prompt is None:
            return
        self._long_characters -= prompt.size
        running = loop.run_in_executor(self._long_thread, prompt.run)

        def finish(done: asyncio.Future[Any]) -> None:
            _resolve(prompt.ids, done.result())
            self._run_long(loop)

        running.add_done_callback(finish)

    def _refuse_long(self, pieces: list[str]) -> None:
        if self._max_tokens is None:
            return
        least = self._bound.min_tokens(pieces)
        if least > self._max_tokens:
            raise ContextLengthError(
                f"the prompt has at least {least} tokens ({sum(map(len, pieces))} characters); "
                f"this server takes {self._max_tokens}. Shorten it."
            )

    def _encode(self, pieces: list[str], add_special_tokens: bool) -> list[int]:
        """In a thread: refuse what is too long whatever its tokens are, encode the rest."""
        self._refuse_long(pieces)
        slices = (pieces[at : at + _SLICE] for at in range(0, len(pieces), _SLICE))
        return [
            token
            for each in slices
            for ids in self._encode_pieces(each, add_special_tokens)
            for token in ids
        ]

    def _encode_pieces(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return encode_texts(texts, self._tokenizer, add_special_tokens=add_special_tokens)


class _LongPrompt(NamedTuple):
    encode: Callable[[], Any]
    size: int
    ids: asyncio.Future[Any]

    def run(self) -> Any:
        """In a thread; an error is the request's, not the thread's."""
        try:
            return self.encode()
        except Exception as error:
            return error


def _resolve(ids: asyncio.Future[Any], found: Any) -> None:
    if ids.done():  # its request was cancelled
        return
    if isinstance(found, Exception):
        ids.set_exception(found)
    else:
        ids.set_result(found)


def _with_files(message: Mapping[str, Any], max_bytes: int) -> dict[str, Any]:
    """The message with its images' files, none of them larger."""
    if not isinstance(message.get("content"), list):
        return dict(message)
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            part = {**part, "image": _read_base64(part["image"], max_bytes)}
        parts.append(part)
    return {**message, "content": parts}


def _read_base64(text: str, max_bytes: int) -> bytes:
    size = len(text) // 4 * 3 - text[-2:].count("=")
    if size > max_bytes:
        raise InputError(
            f"an image has {size} bytes; this server takes {max_bytes}. Send a smaller one."
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"an image's data URL does not hold base64: {error}.") from error


def _size_of(value: Any) -> int:
    """Characters of all text in there; a number, a name or a list costs a few too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _size_of(each) for name, each in value.items())
    if isinstance(value, Sequence):
        return len(value) + sum(map(_size_of, value))
    return 8


class TokenBound:
    """The least number of tokens that a text can have, without tokenising it.

    A byte's weight is one by the length of the longest token that holds it, so that the weights
    of a token's bytes add up to one at most, and those of a text's bytes to no more than its
    tokens. That needs a tokenizer whose tokens are the text's bytes, none of them dropped; of any
    other nothing is known, and the bound is 0.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._weights = None if backend is None else _byte_weights(tokenizer, backend)
        self._forms: list[str] = []
        self._strips = False
        self._covered: set[str] = set()
        """Characters that surely become part of a token."""
        if backend is not None and self._weights is not None:
            self._forms = _normal_forms(backend) or []
            added = backend.get_added_tokens_decoder().values()
            self._strips = any(each.lstrip or each.rstrip for each in added)
            whole = np.count_nonzero(self._weights) == len(_UTF8)
            visible = map(chr, range(0x21, 0x7F) if whole or not self._forms else ())
            self._covered = {each for each in visible if self._weights[ord(each)]}

    def min_tokens(self, pieces: Sequence[str]) -> int:
        """Of these, encoded one by one."""
        if self._weights is None:
            return 0
        text = "".join(pieces).replace(_METASPACE, " ")  # what spaces become may be typed, too
        if self._strips:  # an added token may take any white space around it
            text = "".join(text.split())
        for form in self._forms if not text.isascii() else ():
            text = unicodedata.normalize(form, text)  # type: ignore[arg-type]
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.bincount(data, minlength=256)
        least = math.ceil(float(counts @ self._weights) * (1 - 1e-9))
        # Pieces are encoded one by one: each has a token of its own.
        return max(least, sum(1 for piece in pieces if piece[:1] in self._covered))


_LOSSLESS = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"})
"""Pre-tokenizers that drop nothing, unless they are told to."""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that text has."""


def _byte_weights(tokenizer: Any, backend: Tokenizer) -> np.ndarray[Any, Any] | None:
    """By byte; None where a token's bytes are not the text's."""
    texts = TokenTexts(tokenizer)
    kinds = [each["type"] for each in _steps(backend.pre_tokenizer)]
    kept = _LOSSLESS.issuperset(kinds) and "Removed" not in str(_steps(backend.pre_tokenizer))
    by_bytes = "ByteLevel" in kinds
    falls_back = texts.spaced and getattr(backend.model, "byte_fallback", False)
    if not (kept and (by_bytes or falls_back)) or _normal_forms(backend) is None:
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = {texts.bytes_of(token) for token in vocab.values()}
    # A byte without a token is dropped, or unknown together with all around it.
    known = {byte for byte in _UTF8 if bytes([byte]) in tokens}
    if not by_bytes and known != _UTF8:
        return None
    weights = np.zeros(256)
    for token in sorted(tokens, key=len):
        weights[list(known.intersection(token))] = 1 / len(token)  # the longest last
    return weights


def _normal_forms(backend: Tokenizer) -> list[str] | None:
    """Unicode forms that text is brought into; None where it is changed in other ways."""
    forms = []
    for step in _steps(backend.normalizer):
        match step:
            case {"type": str(form)} if form in _FORMS:
                forms.append(form)
            case {"type": "Prepend", "prepend": "\u2581"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass  # one character for another, and back in the token's text
            case _:
                return None
    return forms


def _steps(part: Any) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's own, those of a sequence one by one."""
    if part is None:
        return []
    found = json.loads(part.__getstate__())
    if found["type"] != "Sequence":
        return [found]
    return list(found.get("normalizers") or found.get("pretokenizers") or ())


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
        self._names = _special_names(tokenizer)

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
        if not self._has_special([*messages, template_kwargs]):
            return [render_chat(messages, self._tokenizer, template_kwargs)]
        # Neither case nor white space, which templates change, and nothing that can be guessed.
        cut = "".join(secrets.choice(_NONCHARACTERS) for _ in range(12))
        text = render_chat(
            [self._split(message, cut) for message in messages],
            self._tokenizer,
            {name: self._split(value, cut) for name, value in template_kwargs.items()},
        )
        return [piece for piece in text.split(cut) if piece]

    def refuse_special(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a chat that must be encoded whole and has a special token's name in its text."""
        texts = [
            {**message, "content": [part.get("text", "") for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        if self._has_special([*texts, template_kwargs]):
            raise InputError(
                "the text of a chat with images holds the name of a special token, which the model "
                "would read as that token; leave it out."
            )

    def _has_special(self, value: Any) -> bool:
        if isinstance(value, str):
            return any(name in value for name in self._names)
        if isinstance(value, Mapping):
            return any(self._has_special([*each]) for each in value.items())
        return isinstance(value, Sequence) and any(self._has_special(each) for each in value)

    def _split(self, value: Any, cut: str) -> Any:
        """The same with `cut` inside every name of a special token."""
        if isinstance(value, str):
            for name in self._names:
                while name in value:  # again, for a name that overlaps itself
                    value = value.replace(name, name[0] + cut + name[1:])
            return value
        if isinstance(value, Mapping):
            return {self._split(name, cut): self._split(each, cut) for name, each in value.items()}
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
        self.spaced = _METASPACE in decoder or "Metaspace" in decoder
        """Whether tokens write a space as a mark."""
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
        if self.spaced:
            return str(name).replace(_METASPACE, " ").encode()
        return str(self.tokenizer.decode([token])).encode()


def _decoder(tokenizer: Any) -> str:
    """How tokens become text, as the tokenizer's file says it; empty if it has none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return ""
    state = decoder.__getstate__()
    return state.decode("utf-8") if isinstance(state, bytes) else str(state)
