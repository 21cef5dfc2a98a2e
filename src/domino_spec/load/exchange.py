"""One request and what came back: times, counts, and how it ended."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

BUSY = "busy"
"""HTTP 429 that says when to come back; one that does not is an HTTP error like others."""
TIMEOUT = "timeout"
CONNECTION = "connection"
"""Nobody answered: no connection, or it was gone before the answer began."""
BROKEN = "broken stream"
"""The answer began and was cut off."""
MALFORMED = "malformed"
"""Not what the API promises."""
SERVER = "error in stream"
"""The server said in mid-stream that it failed."""
INTERRUPTED = "interrupted"
"""By us: the run was ended before the answer was."""


def http_error(status: int, retry_after: str | None) -> str:
    """The class of an answer that is none."""
    return BUSY if status == 429 and retry_after is not None else f"HTTP {status}"


@dataclass
class Exchange:
    """Filled while the answer comes, so that nothing is lost wherever it breaks off.

    Times are those of the event loop's clock.
    """

    scheduled: float
    """When the request was due; latency counts from here."""
    sent: float | None = None
    ended: float | None = None
    status: int | None = None
    error: str | None = None
    message: str | None = None
    retry_after: str | None = None
    chunk_times: list[float] = field(default_factory=list)
    """Of those that carried text or tokens."""
    chunk_tokens: list[int | None] = field(default_factory=list)
    """How many tokens each held, where the server tells."""
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def fail(self, error: str, message: str = "") -> None:
        """What went wrong first is what went wrong."""
        if self.error is None:
            self.error, self.message = error, " ".join(message.split())[:300] or None

    def to_record(self, start: float) -> dict[str, Any]:
        """Plain values; times in seconds from `start`, gaps between chunks in microseconds."""

        def since(value: float | None) -> float | None:
            return None if value is None else round(value - start, 6)

        at_us = [round((at - start) * 1e6) for at in self.chunk_times]
        told = None if None in self.chunk_tokens else self.chunk_tokens
        prompt_details = _object(self.usage.get("prompt_tokens_details"))
        details = _object(self.usage.get("completion_tokens_details"))
        text = "".join(self.text)
        return {
            "scheduled": since(self.scheduled),
            "sent": since(self.sent),
            "first": since(self.chunk_times[0] if self.chunk_times else None),
            "last": since(self.chunk_times[-1] if self.chunk_times else None),
            "ended": since(self.ended),
            "gaps_us": [after - before for before, after in itertools.pairwise(at_us)],
            "chunk_tokens": told,
            "status": self.status,
            "error": self.error,
            "message": self.message,
            "retry_after": self.retry_after,
            "finish_reason": self.finish_reason,
            "prompt_tokens": _count(self.usage.get("prompt_tokens")),
            "tokens": _count(self.usage.get("completion_tokens")),
            "cached_tokens": _count(prompt_details.get("cached_tokens")),
            "accepted": _count(details.get("accepted_prediction_tokens")),
            "rejected": _count(details.get("rejected_prediction_tokens")),
            "characters": len(text),
            "text_sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        }


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
