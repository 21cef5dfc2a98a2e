"""What stands before and behind a message in the target's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from domino_spec.data.chat import ChatEncoder, special_ids
from domino_spec.data.report import BadRow
from domino_spec.errors import DataError

_MARKER = "dominomarkerqzx"


@dataclass(frozen=True)
class Turn:
    """The frame of one role's message."""

    opening: str
    end_ids: frozenset[int]
    """The special token that ends it, if one does."""
    end_text: str
    """What ends it otherwise; empty if a special token or nothing does."""


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
