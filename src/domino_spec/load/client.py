"""Sends requests over HTTP and keeps what comes back, with its times."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from domino_spec.errors import InputError, UnreachableError
from domino_spec.load.answers import StreamReader, error_message, take_whole
from domino_spec.load.bodies import PATHS
from domino_spec.load.exchange import (
    BROKEN,
    CONNECTION,
    MALFORMED,
    TIMEOUT,
    Exchange,
    http_error,
)
from domino_spec.load.settings import Settings, Side
from domino_spec.load.sse import EventStream

if TYPE_CHECKING:
    import aiohttp

_IDLE_SECONDS = 2.0
"""Less than servers keep a connection (uvicorn: 5 s), so that none is found dead."""
_ASKING_SECONDS = 30.0
_STREAM = "text/event-stream"


class Client:
    """One session for all sides; as many connections as there are requests under way."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError as error:
            raise InputError(
                "load on a server needs the aiohttp package; pip install 'domino-spec[load]'."
            ) from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None),
            # A packed stream waits for a full pack.
            headers={"Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, side: Side, body: dict[str, Any], exchange: Exchange) -> None:
        """One request; whatever it meets stands in the exchange afterwards."""
        import aiohttp

        loop = asyncio.get_running_loop()
        exchange.sent = loop.time()
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._post(side, body, exchange)
        except TimeoutError:
            exchange.fail(TIMEOUT, f"no whole answer in {self._settings.timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            kind = CONNECTION if exchange.status is None else BROKEN
            exchange.fail(kind, f"{type(error).__name__}: {error}")
        finally:
            if exchange.ended is None:
                exchange.ended = loop.time()

    async def _post(self, side: Side, body: dict[str, Any], exchange: Exchange) -> None:
        async with self._open.post(
            side.url + PATHS[self._settings.endpoint],
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **_key(side.api_key)},
            allow_redirects=False,
        ) as response:
            exchange.status = response.status
            if response.status != 200:
                exchange.retry_after = response.headers.get("Retry-After")
                text = (await response.read()).decode("utf-8", errors="replace")
                kind = http_error(response.status, exchange.retry_after)
                exchange.fail(kind, error_message(_json(text), text))
            elif not self._settings.stream:
                take_whole(await response.read(), exchange)
            elif response.content_type != _STREAM:
                exchange.fail(MALFORMED, f"a stream was asked, {response.content_type} came")
            else:
                await self._read_stream(response, exchange)

    async def _read_stream(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        events, reader = EventStream(), StreamReader(exchange)
        async for data in response.content.iter_any():
            at = loop.time()
            try:
                for event in events.feed(data):
                    reader.take(event, at)
            except UnicodeDecodeError:
                exchange.fail(MALFORMED, "an event is not UTF-8")
        reader.close(loop.time())

    async def get(self, url: str, api_key: str | None) -> tuple[int, Any]:
        """Status and JSON of a route that tells something; None where it is no JSON."""
        import aiohttp

        try:
            async with (
                asyncio.timeout(_ASKING_SECONDS),
                self._open.get(url, headers=_key(api_key)) as response,
            ):
                return response.status, _json(await response.text(errors="replace"))
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            said = str(error) or type(error).__name__
            raise UnreachableError(
                f"nothing answers at {url} ({said}); is the server running, and that its address?"
            ) from error

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("a client is used inside `async with`.")
        return self._session


async def model_of(client: Client, url: str, api_key: str | None) -> str:
    """The first model that a server says it has."""
    status, reply = await client.get(f"{url}/v1/models", api_key)
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        hint = "name it with --model"
        if status in (401, 403):
            hint = "check the key (OPENAI_API_KEY, or what --api-key-env names)"
        raise UnreachableError(
            f"{url}/v1/models answered {status} and names no model; {hint}."
        ) from error


async def facts_of(client: Client, side: Side) -> dict[str, Any] | None:
    """What our own server tells about itself; None of others."""
    status, reply = await client.get(f"{side.url}/v1/domino", side.api_key)
    return reply if status == 200 and isinstance(reply, dict) else None


def _key(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
