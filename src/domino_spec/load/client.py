"""HTTP client: sends requests, reads responses (streamed or whole), records times and errors."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from domino_spec.errors import InputError, UnreachableError
from domino_spec.load.settings import LoadSettings, Side

if TYPE_CHECKING:
    import aiohttp

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# How requests fail, as records have it; other statuses are "HTTP n".
BUSY = "busy"  # HTTP 429 with Retry-After
TIMEOUT = "timeout"
CONNECTION = "connection"  # no connection, or closed before the response began
BROKEN = "broken stream"  # cut off, or a choice did not finish
MALFORMED = "malformed"  # not what the API specifies
SERVER = "error in stream"  # reported by the server in mid-stream
INTERRUPTED = "interrupted"  # by the end of the run

_KEEP_ALIVE_SECONDS = 2.0
"""Less than servers keep a connection (uvicorn: 5 s), so that none is found closed."""
_GET_SECONDS = 30.0
_TEXTS = ("content", "reasoning_content", "reasoning", "text")


@dataclass
class RequestTrace:
    """One request, filled while its response arrives: nothing is lost where it breaks off.

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
    """Of the chunks that carried text or tokens."""
    chunk_tokens: list[int | None] = field(default_factory=list)
    """Tokens of each, where the server tells."""
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    _finished: dict[int, bool] = field(default_factory=dict)
    """By choice."""
    _counted: int | None = 0
    """Tokens so far, by usage in every chunk; None once a chunk with text came without."""
    _done: bool = False

    def fail(self, error: str, message: str = "") -> None:
        """Only the first error is kept."""
        if self.error is None:
            self.error, self.message = error, " ".join(message.split())[:300] or None

    def take_event(self, event: str, at: float) -> None:
        """One event of a stream that arrived at this time."""
        if self._done:
            return
        if event == "[DONE]":
            self._done, self.ended = True, at
            return
        try:
            chunk = json.loads(event)
            if "error" in chunk and not chunk.get("choices"):
                self.fail(SERVER, _error_message(chunk, event))
            else:
                self._take_chunk(chunk, at)
        except (ValueError, TypeError, AttributeError, LookupError):
            self.fail(MALFORMED, f"an event is {event[:120]!r}")

    def end_stream(self, at: float) -> None:
        """Check that every choice has finished."""
        if self.ended is None:
            self.ended = at
        if not self._finished or not all(self._finished.values()):
            where = "after the end mark" if self._done else "without an end mark"
            self.fail(BROKEN, f"it ended {where}, before every choice had finished")

    def take_body(self, body: bytes) -> None:
        """A response that was not streamed."""
        try:
            reply = json.loads(body)
            choices = reply["choices"]
            self.text = [_text_of(choice.get("message") or choice) for choice in choices]
            self.finish_reason = str(choices[-1]["finish_reason"])
            self.usage = _object(reply.get("usage"))
        except (ValueError, TypeError, AttributeError, LookupError):
            self.fail(MALFORMED, f"the response is {body[:120]!r}")

    def _take_chunk(self, chunk: dict[str, Any], at: float) -> None:
        choices, usage, text = chunk["choices"], _object(chunk.get("usage")), ""
        self.usage = usage or self.usage
        for choice in choices:
            index, reason = int(choice.get("index", 0)), choice.get("finish_reason")
            self._finished[index] = self._finished.get(index, False) or reason is not None
            text += _text_of(choice.get("delta") or choice)
            if reason is not None:
                self.finish_reason = str(reason)
        tokens = _tokens_of(chunk)
        if choices and tokens is None and self._counted is not None:
            total = _count(usage.get("completion_tokens"))
            if total is not None:
                tokens, self._counted = total - self._counted, total
            elif text:
                self._counted = None
        if text or tokens:
            self.text.append(text)
            self.chunk_times.append(at)
            self.chunk_tokens.append(tokens)

    def to_record(self, start: float) -> dict[str, Any]:
        """Plain values; times in seconds from `start`, gaps between chunks in microseconds."""
        first, last = (
            (self.chunk_times[0], self.chunk_times[-1]) if self.chunk_times else (None,) * 2
        )
        times = {"scheduled": self.scheduled, "sent": self.sent, "first": first, "last": last,
                 "ended": self.ended}  # fmt: skip
        at_us = [round((at - start) * 1e6) for at in self.chunk_times]
        prompt_details = _object(self.usage.get("prompt_tokens_details"))
        details = _object(self.usage.get("completion_tokens_details"))
        text = "".join(self.text)
        return {
            **{n: None if at is None else round(at - start, 6) for n, at in times.items()},
            "gaps_us": [after - before for before, after in itertools.pairwise(at_us)],
            "chunk_tokens": None if None in self.chunk_tokens else self.chunk_tokens,
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


class EventStream:
    """Server-sent events out of bytes, however the network splits them."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """Events that these bytes complete; UnicodeDecodeError where one is not UTF-8."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":  # comments, ids and event names are skipped
                self._data.append(value.removeprefix(b" "))
            elif not line.strip(b"\r") and self._data:
                event, self._data = b"\n".join(self._data), []
                yield event.decode("utf-8")


class Client:
    """One session for all sides, with as many connections as requests in flight."""

    def __init__(self, settings: LoadSettings, session: aiohttp.ClientSession) -> None:
        self._settings, self._session = settings, session

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: LoadSettings) -> AsyncIterator[Self]:
        """A client whose connections are closed at the end."""
        try:
            import aiohttp
        except ImportError as error:
            raise InputError(
                "domino bench serve needs the aiohttp package; pip install 'domino-spec[load]'."
            ) from error
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Accept-Encoding": "identity"},  # a compressed stream waits for a full block
        ) as session:
            yield cls(settings, session)

    async def send(self, side: Side, body: dict[str, Any], trace: RequestTrace) -> None:
        """One request; the trace has its outcome, also of a failure."""
        import aiohttp

        loop = asyncio.get_running_loop()
        trace.sent = loop.time()
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._post(side, body, trace)
        except TimeoutError:
            trace.fail(TIMEOUT, f"no complete response in {self._settings.timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            kind = CONNECTION if trace.status is None else BROKEN
            trace.fail(kind, f"{type(error).__name__}: {error}")
        finally:
            if trace.ended is None:
                trace.ended = loop.time()

    async def _post(self, side: Side, body: dict[str, Any], trace: RequestTrace) -> None:
        async with self._session.post(
            side.url + PATHS[self._settings.endpoint],
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **_authorization(side.api_key)},
            allow_redirects=False,
        ) as response:
            trace.status = response.status
            if response.status != 200:
                trace.retry_after = response.headers.get("Retry-After")
                text = (await response.read()).decode("utf-8", errors="replace")
                busy = response.status == 429 and trace.retry_after is not None
                trace.fail(BUSY if busy else f"HTTP {response.status}",
                           _error_message(_json(text), text))  # fmt: skip
            elif not self._settings.stream:
                trace.take_body(await response.read())
            elif response.content_type != "text/event-stream":
                trace.fail(MALFORMED, f"expected a stream, got {response.content_type}")
            else:
                await _read_stream(response, trace)

    async def model_of(self, url: str, api_key: str | None) -> str:
        """The first model that a server lists."""
        status, reply = await self._get(f"{url}/v1/models", api_key)
        try:
            return str(reply["data"][0]["id"])
        except (LookupError, TypeError) as error:
            hint = "name it with --model"
            if status in (401, 403):
                hint = "check the key (OPENAI_API_KEY, or what --api-key-env names)"
            raise UnreachableError(
                f"{url}/v1/models answered {status} and names no model; {hint}."
            ) from error

    async def server_facts(self, side: Side) -> dict[str, Any] | None:
        """What a domino-spec server reports about itself; None from other servers."""
        status, reply = await self._get(f"{side.url}/v1/domino", side.api_key)
        return reply if status == 200 and isinstance(reply, dict) else None

    async def _get(self, url: str, api_key: str | None) -> tuple[int, Any]:
        import aiohttp

        try:
            async with (
                asyncio.timeout(_GET_SECONDS),
                self._session.get(url, headers=_authorization(api_key)) as response,
            ):
                return response.status, _json(await response.text(errors="replace"))
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise UnreachableError(
                f"nothing answers at {url} ({reason}); is the server running, and is that its URL?"
            ) from error


async def _read_stream(response: aiohttp.ClientResponse, trace: RequestTrace) -> None:
    loop, events = asyncio.get_running_loop(), EventStream()
    async for data in response.content.iter_any():
        at = loop.time()
        try:
            for event in events.feed(data):
                trace.take_event(event, at)
        except UnicodeDecodeError:
            trace.fail(MALFORMED, "an event is not UTF-8")
    trace.end_stream(loop.time())


def _error_message(reply: Any, text: str) -> str:
    inner = reply.get("error", reply) if isinstance(reply, dict) else reply
    return str(inner.get("message", text) if isinstance(inner, dict) else inner)


def _text_of(part: dict[str, Any]) -> str:
    """All text of a message, a delta, or a choice of the completions endpoint."""
    return "".join(part[name] for name in _TEXTS if part.get(name))


def _tokens_of(chunk: dict[str, Any]) -> int | None:
    """Tokens of a chunk by domino-spec's extension, or by log-probabilities."""
    tokens = _object(chunk.get("domino")).get("tokens")
    if isinstance(tokens, list):
        return len(tokens)
    count = None
    for choice in chunk["choices"]:
        logprobs = choice.get("logprobs") or {}
        listed = logprobs.get("content") or logprobs.get("tokens")
        if listed is None:
            return None
        count = len(listed) + (count or 0)
    return count


def _authorization(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
