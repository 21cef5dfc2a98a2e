"""Errors in the shape that OpenAI's clients know, whatever they were."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from domino_spec.errors import InputError
from domino_spec.serving.errors import BusyError, StoppingError, TooLongError, TooManyError
from domino_spec.serving.http.refused import WHY_REFUSED

_log = logging.getLogger("domino_spec.serving")

_TYPES = {403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_STOPPING_RETRY_SECONDS = 5
"""By then another server stands in its place, or nobody."""


class ErrorBody(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The body of everything that is no answer."""

    error: ErrorBody


class ApiError(HTTPException):
    """Something a client is told, with everything a client may want to know."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param

    @property
    def reply(self) -> ErrorReply:
        """Its body."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.detail,
                "type": _TYPES.get(self.status_code, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def response(self) -> JSONResponse:
        """Ready to be sent."""
        return JSONResponse(self.reply, self.status_code, self.headers)


class ClientGoneError(Exception):
    """The client hung up; there is nobody to answer."""


def as_api_error(error: Exception, *, request_id: str) -> ApiError:
    """What a client is told about any error; of a bug only where it can be looked up."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, TooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InputError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, BusyError):
        return ApiError(
            429, str(error), code="rate_limit_exceeded", headers=_later(error.retry_after)
        )
    if isinstance(error, StoppingError):
        return ApiError(
            503, str(error), code="server_stopping", headers=_later(_STOPPING_RETRY_SECONDS)
        )
    _log.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500,
        f"the server failed to answer this request; its log says why under {request_id}.",
        code="internal_error",
    )


async def answer_error(request: Request, error: Exception) -> Response:
    """The application's handler of every exception."""
    return as_api_error(error, request_id=request_id_of(request.scope)).response


def request_id_of(scope: Any) -> str:
    """What the guard called this request."""
    return str(scope.get("state", {}).get("request_id", "(no id)"))


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Say that this parameter is the one that makes no sense."""
    try:
        yield
    except TooManyError as error:
        code = "context_length_exceeded"
        raise ApiError(400, str(error), code=code, param="max_tokens") from error
    except TooLongError as error:
        raise ApiError(400, str(error), code="context_length_exceeded", param=param) from error
    except InputError as error:
        raise ApiError(400, str(error), code="invalid_value", param=param) from error


def _later(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _from_http(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = {
        404: "there is nothing at this path; the API is under /v1/.",
        405: "this path does not take this method.",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """One sentence about the first field that is wrong.

    A field that may be several things is wrong in as many ways; the way that got furthest is the
    one that was meant.
    """
    places = [(_place(error, body), error) for error in errors]
    first = places[0][0][:1]
    place, error = max((found for found in places if found[0][:1] == first), key=_depth)
    param = (error.get("ctx") or {}).get("param") or _path(place) or None
    field = str(place[0]) if place else param
    if error["type"] == "missing":
        if not place:
            return ApiError(400, "the body is empty; expected a JSON object.", code="invalid_json")
        return ApiError(400, f"{param} is missing.", code="missing_required_parameter", param=param)
    if error["type"] == "extra_forbidden":
        message = f"{param} is not a parameter of this endpoint."
        return ApiError(400, message, code="unknown_parameter", param=param)
    if error["type"] == "unsupported" or field in WHY_REFUSED:
        why = WHY_REFUSED.get(field or "") or f"{error['msg']}."
        return ApiError(400, f"{param}: {why}", code="unsupported_parameter", param=param)
    words = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    message = f"{param or 'the body'}: {_small(words)}."
    return ApiError(400, message, code="invalid_value", param=param)


def _depth(found: tuple[Sequence[str | int], Mapping[str, Any]]) -> tuple[int, int]:
    place = found[0]
    last = place[-1] if place else 0
    return len(place), last if isinstance(last, int) else 0


def _small(words: str) -> str:
    return words[:1].lower() + words[1:]


def _place(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """Where in the body; pydantic's names for the members of a union are left out."""
    place: list[str | int] = []
    here = body
    steps = list(error["loc"])[1:]
    for number, step in enumerate(steps):
        named = isinstance(here, dict) and step in here
        if named or (isinstance(here, list) and isinstance(step, int) and step < len(here)):
            here = here[step]
        elif not (error["type"] == "missing" and number == len(steps) - 1):
            continue
        place.append(step)
    return tuple(place)


def _path(place: Sequence[str | int]) -> str:
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return words.removeprefix(".")[:200]
