"""Chats: rows as messages, rendered by the target's template, with the assistant's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError

from domino_spec.data.files import BadRow
from domino_spec.errors import DataError

BoolArray = npt.NDArray[np.bool_]
Message = dict[str, Any]
CUT = "length"
"""The finish_reason of an answer that was cut: the target did not end it."""
_MARKER = "dominomarkerqzx"
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_FOLLOW = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def messages_of(row: Mapping[str, Any], field: str | None = None) -> list[Message] | None:
    """The row's messages, or None if it has none."""
    for name in (field,) if field else ("messages", "conversations"):
        value = row.get(name)
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or not all(isinstance(m, Mapping) for m in value):
            raise BadRow("its messages are not a list of objects")
        if not value:
            raise BadRow("it is empty")
        return [_message(message) for message in value]
    return None


def up_to_last_answer(messages: list[Message]) -> list[Message]:
    """Messages up to the last assistant turn; roles out of order are refused."""
    before: str | None = None
    for message in messages:
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            raise BadRow(
                f"its roles are out of order ({role} after {before})"
                if before
                else f"its roles are out of order ({role} comes first)"
            )
        before = role
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRow("it has no assistant turn (`domino data answer` lets the target write them)")
    return messages[: answers[-1] + 1]


def _message(message: Mapping[str, Any]) -> Message:
    role, content = message.get("role"), message.get("content")
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    if "role" not in message:
        if "from" not in message:
            raise BadRow("a message has neither role and content nor from and value")
        role = _SHAREGPT_ROLES.get(message["from"], message["from"])
        content, rest = message.get("value"), {}
    if role not in _ROLES:
        raise BadRow(f"it has a message from {role!r}, an unknown role")
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts) or isinstance(content, Mapping):
        raise BadRow("a message holds something other than text")
    text = "".join(texts)
    if not text.strip() and role in ("user", "assistant"):
        raise BadRow(f"it has an empty {role} turn")
    return {"role": role, "content": text, **rest}


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
                "the data are chats but the target's tokenizer has no chat template; "
                "`domino data answer` without --server continues their prompts as plain text. Or "
                "give texts, or save a template with the tokenizer."
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
        return str(self._apply(messages, tokenize=False, add_generation_prompt=open_turn))

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **options, **self._options)
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            line = " ".join(str(error).split())[:80] or type(error).__name__
            raise BadRow(f"the chat template does not take it ({line})") from error

    def encode(self, messages: list[Message]) -> EncodedChat:
        """Token ids of a chat that ends in an assistant turn, and those to learn."""
        encoded = self._by_marks(messages) if self._is_marked else None
        return encoded or self._by_prefixes(messages)

    def _by_marks(self, messages: list[Message]) -> EncodedChat | None:
        output = self._apply(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
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
        prefixes = (self._ids(text[:place]) for place in places)
        return tokens, [sum(takewhile(bool, map(eq, tokens, prefix))) for prefix in prefixes]

    def _ids(self, text: str) -> list[int]:
        return [
            int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ]

    def _turn_end(self, tokens: list[int], first: int, last: int) -> int:
        """After the end-of-turn token: what the template adds then is not generated."""
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


@dataclass(frozen=True)
class Turn:
    """What the chat template writes before and after one role's message."""

    opening: str
    end_ids: frozenset[int]
    """The special token that ends it, if one does."""
    end_text: str
    """What ends it otherwise; empty if a special token or nothing does."""


NO_TURN = Turn("", frozenset(), "")


def find_turn(
    tokenizer: Any,
    role: Literal["user", "assistant"],
    chat_options: Mapping[str, Any] | None = None,
    *,
    system: str | None = None,
) -> Turn:
    """Render a marker as a message of this role and look around it."""
    marked = {"role": role, "content": _MARKER}
    before = [] if system is None else [{"role": "system", "content": system}]
    before += [] if role == "user" else [{"role": "user", "content": "?"}]
    try:
        text = ChatEncoder(tokenizer, chat_options).render([*before, marked])
    except BadRow as error:
        raise DataError(
            f"{error}: a {role} message alone; the target's turns cannot be told."
        ) from error
    opening, found, closing = text.rpartition(_MARKER)
    if not found:
        raise DataError(
            f"the target's chat template does not repeat a {role} message as it is; the target's "
            "turns cannot be told. Give prompts of your own."
        )
    ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
    if ids and int(ids[0]) in special_ids(tokenizer):
        return Turn(opening, frozenset({int(ids[0])}), "")
    return Turn(opening, frozenset(), closing.strip())
