"""Bodies: JSON, strictly, and not without end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from domino_spec.serving.http.errors import ApiError


class JsonRequest(Request):
    """A request whose body is one JSON object.

    The parser takes no NaN, no half of a surrogate pair, no bytes that are not UTF-8 and nothing
    nested without end.
    """

    async def body(self) -> bytes:
        """The bytes, if they say that they are JSON.

        Whoever sends something else is told so, and no page of another site can: a browser asks
        before it sends JSON across sites, and gets no permission here.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                f"the content type is {kind[:80]!r}; expected application/json.",
                code="unsupported_media_type",
            )
        return await super().body()

    async def json(self) -> Any:
        """The object."""
        try:
            value = from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(
                400, f"the body is not JSON that can be read: {error}.", code="invalid_json"
            ) from error
        if not isinstance(value, dict):
            raise ApiError(
                400,
                f"the body is a JSON {type(value).__name__}; expected an object.",
                code="invalid_json",
            )
        return value


class JsonRoute(APIRoute):
    """A route that reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a stricter request."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return strictly
