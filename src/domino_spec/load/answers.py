"""Reads answers of the two endpoints, streamed or whole, into an exchange."""

from __future__ import annotations

import json
from typing import Any

from domino_spec.load.exchange import BROKEN, MALFORMED, SERVER, Exchange

DONE = "[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


class StreamReader:
    """Takes a stream's events one by one."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._finished: dict[int, bool] = {}
        self._counted = 0
        self._counts_each = True
        """Whether usage stood in every chunk of text: then its steps are the chunks' tokens."""
        self.done = False

    def take(self, event: str, at: float) -> None:
        """One event that arrived at this time."""
        if self.done:
            return
        if event == DONE:
            self.done = True
            self._exchange.ended = at
            return
        try:
            chunk = json.loads(event)
            if "error" in chunk and not chunk.get("choices"):
                self._exchange.fail(SERVER, error_message(chunk, event))
                return
            self._chunk(chunk, at)
        except (ValueError, TypeError, AttributeError, KeyError, LookupError):
            self._exchange.fail(MALFORMED, f"an event is {event[:120]!r}")

    def close(self, at: float) -> None:
        """The stream's end: nothing may be missing."""
        if self._exchange.ended is None:
            self._exchange.ended = at
        if not self._finished or not all(self._finished.values()):
            where = "after the end mark" if self.done else "without an end mark"
            self._exchange.fail(BROKEN, f"it ended {where}, before every choice had finished")

    def _chunk(self, chunk: dict[str, Any], at: float) -> None:
        choices, text = chunk["choices"], ""
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._exchange.usage = usage
        for choice in choices:
            index, reason = int(choice.get("index", 0)), choice.get("finish_reason")
            self._finished[index] = self._finished.get(index, False) or reason is not None
            text += text_of(choice.get("delta") or choice)
            if reason is not None:
                self._exchange.finish_reason = str(reason)
        told = _tokens_told(chunk)
        if choices and told is None and self._counts_each:
            told = self._step_of(usage)
            self._counts_each = told is not None or not text
        if text or told:
            self._exchange.text.append(text)
            self._exchange.chunk_times.append(at)
            self._exchange.chunk_tokens.append(told)

    def _step_of(self, usage: Any) -> int | None:
        if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
            return None
        before, self._counted = self._counted, usage["completion_tokens"]
        return int(self._counted - before)


def take_whole(body: bytes, exchange: Exchange) -> None:
    """An answer that was not streamed."""
    try:
        reply = json.loads(body)
        choices = reply["choices"]
        exchange.text = [text_of(choice.get("message") or choice) for choice in choices]
        exchange.finish_reason = str(choices[-1]["finish_reason"])
        usage = reply.get("usage")
        exchange.usage = usage if isinstance(usage, dict) else {}
    except (ValueError, TypeError, AttributeError, KeyError, IndexError):
        exchange.fail(MALFORMED, f"the answer is {body[:120]!r}")


def error_message(reply: Any, text: str) -> str:
    """What a server says about a failure, in a line."""
    inner = reply.get("error", reply) if isinstance(reply, dict) else reply
    said = inner.get("message", text) if isinstance(inner, dict) else inner
    return str(said)


def text_of(part: dict[str, Any]) -> str:
    """All text of a message, a part of one, or a plain completion."""
    return "".join(part[name] for name in _TEXTS if part.get(name))


def _tokens_told(chunk: dict[str, Any]) -> int | None:
    """From our own extension, or from log-probabilities."""
    block = chunk.get("domino")
    if isinstance(block, dict) and isinstance(block.get("tokens"), list):
        return len(block["tokens"])
    count = None
    for choice in chunk["choices"]:
        scores = choice.get("logprobs") or {}
        listed = scores.get("content") or scores.get("tokens")
        if listed is None:
            return None
        count = len(listed) + (count or 0)
    return count
