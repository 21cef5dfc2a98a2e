"""ASGI middleware: allowed hosts, API keys, limits on bodies, and headers of every response."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from domino_spec.serving.config import LOOPBACK, ServerConfig
from domino_spec.serving.errors import ApiError, ClientDisconnectedError, to_api_error
from domino_spec.serving.metrics import Metrics

DISCONNECTED = 499
"""Counted, never sent: the client did not wait for a status."""
UPLOAD_SECONDS = 60
"""For a body: sent byte by byte it would hold a connection and its memory for ever."""
CLIENT: ContextVar[str] = ContextVar("client", default="unknown")
"""Of the request that is handled, for fair queues."""
_REQUESTS_PER_PASS = 8
_CLOSE = {"Connection": "close"}
_REQUESTED = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
"""Names of headers, as a browser lists those that a page wants to send."""
_PREFLIGHT_SECONDS = 600
_FRAMING = (b"content-length", b"transfer-encoding", b"host", b"connection", b"upgrade")
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Middleware:
    """Plain ASGI: Starlette's base class would come between a route and a disconnecting client."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        metrics: Metrics,
        posted: Mapping[str, Route],
    ) -> None:
        """`posted` are routes by path that POST requests take without the application's router."""
        self._app = app
        self._posted = posted
        self._metrics = metrics
        self._pass = asyncio.Semaphore(_REQUESTS_PER_PASS)
        self._max_bytes = config.max_body_bytes
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._origins = frozenset(config.allowed_origins)
        self._hosts = (
            None if config.public else {LOOPBACK, "localhost", "[::1]", config.host.lower()}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, start = DISCONNECTED, time.perf_counter()
        app, cors = self._app, self._cors_headers(scope)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {**dict(message["headers"]), b"x-request-id": request_id.encode(), **cors}
                if names := str(scope["state"].get("ignored_fields") or ""):
                    given[b"x-domino-ignored-fields"] = names.encode("ascii")
                message = {**message, "headers": list((_HEADERS | given).items())}
            await send(message)

        try:
            preflight = _ALLOWS in cors and _is_preflight(scope)
            self._check(scope, keyed=not preflight)  # a browser sends no key with it
            CLIENT.set(client_of(scope))
            if preflight:
                app = Response(status_code=204, headers=_allowed(scope))
            if scope["method"] == "POST":
                await self._wait_for_pass()
                if (route := self._posted.get(scope["path"])) is not None:
                    scope["route"], app = route, route.app
            await app(scope, self._limited(receive), send_with_headers)
        except ClientDisconnectedError:
            pass
        except Exception as error:
            if status != DISCONNECTED:
                raise  # half of a response is out; the connection is all that can be closed
            response = to_api_error(error, request_id=request_id).response
            await response(scope, receive, send_with_headers)
        finally:
            self._metrics.observe_response(
                method=scope["method"],
                path=getattr(scope.get("route"), "path", ""),
                status=status,
                seconds=time.perf_counter() - start,
            )

    async def _wait_for_pass(self) -> None:
        """A few requests in a pass of the event loop: tokens go out in the midst of a burst."""
        async with self._pass:
            await asyncio.sleep(0)

    def _cors_headers(self, scope: Scope) -> dict[bytes, bytes]:
        """What lets a page of an allowed site read the response; none for another's."""
        if not self._origins:
            return {}
        origin = _header(scope, b"origin")
        if origin is None or not ({origin, "*"} & self._origins):
            return {b"vary": b"Origin"} if "*" not in self._origins else {}
        return {
            _ALLOWS: b"*" if "*" in self._origins else origin.encode(),
            b"access-control-expose-headers": b"x-request-id, x-domino-ignored-fields, retry-after",
            b"vary": b"Origin",
        }

    def _check(self, scope: Scope, *, keyed: bool) -> None:
        _check_framing(scope)
        given: list[str] = []
        for name, raw in scope["headers"]:
            value = raw.decode("latin-1")
            if name == b"host":
                self._check_host(value)
            elif name == b"content-length" and raw.isdigit() and int(raw) > self._max_bytes:
                raise self._too_large()
            elif name == b"authorization":
                given.append(value)
        if self._keys and keyed and not is_open(scope["path"]):
            scope["state"]["key"] = self._check_key(given)

    def _check_host(self, host: str) -> None:
        """A page whose name was made to resolve to this machine still sends its own name."""
        host = host.lower()
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name.removesuffix(".") not in self._hosts:
            raise ApiError(
                403,
                f"the request was sent to {name[:80]!r}, but this server serves its own machine "
                "alone; call it by 127.0.0.1, or start it with another host.",
                code="host_not_allowed",
            )

    def _check_key(self, given: list[str]) -> int:
        """Which of the keys it is; every one is compared, whatever was found before."""
        scheme, _, rest = (given[-1] if given else "").partition(" ")
        presented = rest.strip() if scheme.lower() == "bearer" else ""
        digest, found = _digest(presented.encode("latin-1")), -1
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

    def _limited(self, receive: Receive) -> Receive:
        """Bodies of bounded size, within a bounded time."""
        read, whole = 0, False
        deadline = asyncio.get_running_loop().time() + UPLOAD_SECONDS

        async def limited() -> Message:
            nonlocal read, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                message_text = f"the body was not here within {UPLOAD_SECONDS} seconds"
                raise ApiError(
                    408, f"{message_text}; send it faster.", code="request_timeout", headers=_CLOSE
                ) from error
            if message["type"] == "http.request":
                whole = not message.get("more_body", False)
                read += len(message.get("body", b""))
                if read > self._max_bytes:
                    raise self._too_large()
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes; send less.",
            code="request_too_large",
            headers=_CLOSE,
        )


_ALLOWS = b"access-control-allow-origin"


def _is_preflight(scope: Scope) -> bool:
    asks = _header(scope, b"access-control-request-method") is not None
    return scope["method"] == "OPTIONS" and asks


def _header(scope: Scope, name: bytes) -> str | None:
    return next((raw.decode("latin-1") for key, raw in scope["headers"] if key == name), None)


def _allowed(scope: Scope) -> dict[str, str]:
    """What a page of an allowed site may send, in answer to its browser's preflight."""
    found = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST",
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
    }
    headers = _header(scope, b"access-control-request-headers") or ""
    if _REQUESTED.fullmatch(headers):  # clients send headers of their own, which do no harm
        found["Access-Control-Allow-Headers"] = headers
    if _header(scope, b"access-control-request-private-network") == "true":
        found["Access-Control-Allow-Private-Network"] = "true"
    return found


def _check_framing(scope: Scope) -> None:
    """Refuse what a proxy in front of this server may have read as another request.

    The parser refuses most of it by itself; how much depends on its version.
    """
    found: dict[bytes, list[bytes]] = {name: [] for name in _FRAMING}
    for name, value in scope["headers"]:
        if name in found:
            found[name].append(value.strip().lower())
    length, coding = found[b"content-length"], found[b"transfer-encoding"]
    version, wrong = scope.get("http_version"), None
    if length and coding:
        wrong = "the request has both Content-Length and Transfer-Encoding; send one of them."
    elif len(length) > 1 or not all(each.isdigit() for each in length):
        wrong = "the Content-Length is not one whole number; send one."
    elif coding and (coding != [b"chunked"] or version == "1.0"):
        wrong = "the Transfer-Encoding is not chunked, of HTTP/1.1; send a Content-Length instead."
    elif len(found[b"host"]) > 1 or (not found[b"host"] and version == "1.1"):
        wrong = f"the request has {len(found[b'host'])} Host headers; send one."
    if wrong is not None:
        raise ApiError(400, wrong, code="invalid_http", headers=_CLOSE)
    options = b",".join(found[b"connection"]).split(b",")
    if found[b"upgrade"] and b"upgrade" in map(bytes.strip, options):
        # The parser reads nothing after such a head, not even the request's own body.
        raise ApiError(
            400,
            "this server speaks HTTP/1.1 only, no WebSocket or HTTP/2; send the request without "
            "an Upgrade header.",
            code="upgrade_not_supported",
            headers=_CLOSE,
        )


def is_open(path: str) -> bool:
    """What needs no key: the page, which asks for one, and the health checks."""
    return path in ("/", "/health", "/ping") or path.startswith("/page/")


def client_of(scope: Scope) -> str:
    """The client, for the fair queue: its key and address."""
    key = scope.get("state", {}).get("key", "none")
    address = (scope.get("client") or ("unknown",))[0]
    return f"{key}/{address}"


def _digest(key: bytes) -> bytes:
    """All of one length, so that comparing them tells nothing about a key's."""
    return hashlib.sha256(key).digest()
