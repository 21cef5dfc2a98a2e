"""Rows of any common layout as chat messages, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_spec.data.report import BadRow

Message = dict[str, Any]

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
        if row.get(name) is not None:
            return _messages(row[name])
    return None


def check_order(messages: list[Message], *, answered: bool) -> list[Message]:
    """Refuse roles out of order; for training the last assistant turn must end it."""
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
    if not answered:
        return messages
    last = max(
        (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None
    )
    if last is None:
        raise BadRow("it has no assistant turn (`domino data answer` lets the target write them)")
    return messages[: last + 1]


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(m, Mapping) for m in value):
        raise BadRow("its messages are not a list of objects")
    if not value:
        raise BadRow("it is empty")
    return [_message(message) for message in value]


def _message(message: Mapping[str, Any]) -> Message:
    if "role" in message:
        role, content = message["role"], message.get("content")
        rest = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    elif "from" in message:
        role, content, rest = _SHAREGPT_ROLES.get(message["from"]), message.get("value"), {}
        if role is None:
            raise BadRow(f"it has a message from {message['from']!r}, an unknown role")
    else:
        raise BadRow("a message has neither role and content nor from and value")
    if role not in _ROLES:
        raise BadRow(f"it has a message from {role!r}, an unknown role")
    return {"role": role, "content": _text(content, role), **rest}


def _text(content: Any, role: str) -> str:
    if isinstance(content, (list, tuple)):
        parts: list[Any] = [
            part.get("text") if isinstance(part, Mapping) else part for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow("a message holds something other than text")
        content = "".join(parts)
    if not isinstance(content, str):
        raise BadRow("a message holds something other than text")
    if not content.strip() and role in ("user", "assistant"):
        raise BadRow(f"it has an empty {role} turn")
    return content
