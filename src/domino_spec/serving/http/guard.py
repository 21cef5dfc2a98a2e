"""What stands before every route: who may ask, how much, and what every response carries."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from domino_spec.serving.http.errors import ApiError, ClientGoneError, as_api_error
from domino_spec.serving.settings import LOOPBACK, ServerSettings

HUNG_UP = 499
"""Counted, never sent: the client did not wait for a status."""

UPLOAD_SECONDS = 60
"""For a body: who sends it byte by byte would hold a connection and its memory for ever."""

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Counter(Protocol):
    """Counts what was answered."""

    def response(self, *, method: str, path: str, status: int, seconds: float) -> None: ...


class Guard:
    """Plain ASGI, so that nothing comes between a route and its client's hanging up."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, counter: Counter) -> None:
        self._app = app
        self._counter = counter
        self._most_bytes = settings.max_body_bytes
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._hosts = (
            None if settings.public else {LOOPBACK, "localhost", "[::1]", settings.host.lower()}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, start = HUNG_UP, time.perf_counter()

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._counted(receive), marked)
        except ClientGoneError:
            pass
        except Exception as error:
            if status != HUNG_UP:
                raise  # half of a response is out; the connection is all that can be closed
            response = as_api_error(error, request_id=request_id).response
            await response(scope, receive, marked)
        finally:
            self._counter.response(
                method=scope["method"],
                path=getattr(scope.get("route"), "path", ""),
                status=status,
                seconds=time.perf_counter() - start,
            )

    def _check(self, scope: Scope) -> None:
        headers = list(scope["headers"])
        self._check_host(_all(headers, b"host"))
        if self._keys and not is_open(scope["path"]):
            scope["state"]["key"] = self._check_key(_all(headers, b"authorization"))
        for length in _all(headers, b"content-length"):
            if length.isdigit() and int(length) > self._most_bytes:
                raise self._too_large()

    def _check_host(self, hosts: Iterable[bytes]) -> None:
        """A page whose name was made to mean this machine still sends its own name."""
        if self._hosts is None:
            return
        for host in hosts:
            name = _without_port(host.decode("latin-1").lower())
            if name not in self._hosts:
                raise ApiError(
                    403,
                    f"the request was sent to {name[:80]!r}, but this server serves its own "
                    "machine alone; call it by 127.0.0.1, or start it with another host.",
                    code="host_not_allowed",
                )

    def _check_key(self, given: Iterable[bytes]) -> int:
        """Which of the keys it is; every one is looked at, whatever was found before."""
        presented = b""
        for value in given:
            scheme, _, rest = value.partition(b" ")
            presented = rest.strip() if scheme.lower() == b"bearer" else b""
        digest, found = _digest(presented), -1
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(digest, key):
                found = number
        if found < 0:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def _counted(self, receive: Receive) -> Receive:
        read, whole = 0, False
        deadline = asyncio.get_running_loop().time() + UPLOAD_SECONDS

        async def counted() -> Message:
            nonlocal read, whole
            try:
                async with asyncio.timeout_at(None if whole else deadline):
                    message = await receive()
            except TimeoutError as error:
                raise _too_slow() from error
            if message["type"] == "http.request":
                whole = not message.get("more_body", False)
                read += len(message.get("body", b""))
                if read > self._most_bytes:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._most_bytes} bytes; send less.",
            code="request_too_large",
            headers={"Connection": "close"},
        )


def _too_slow() -> ApiError:
    return ApiError(
        408,
        f"the body was not here within {UPLOAD_SECONDS} seconds; send it faster.",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def is_open(path: str) -> bool:
    """What needs no key: the page, which asks for one, and whether the server is up."""
    return path in ("/", "/health") or path.startswith("/page/")


def client_of(scope: Scope) -> str:
    """Who asks, for a fair queue: the key and the address."""
    key = scope.get("state", {}).get("key", "none")
    address = (scope.get("client") or ("unknown",))[0]
    return f"{key}/{address}"


def _digest(key: bytes) -> bytes:
    """All of one length, so that comparing them tells nothing about a key's."""
    return hashlib.sha256(key).digest()


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")
