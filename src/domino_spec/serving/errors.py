"""Why a request is not answered, and what its client is told: every error becomes an `ApiError`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from domino_spec.errors import DominoError, InputError
from domino_spec.serving.protocol import ErrorInfo, ErrorResponse

_log = logging.getLogger("domino_spec.serving")
_TYPES = {403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_HTTP: dict[int, tuple[str | None, str]] = {
    404: ("not_found", "there is nothing at this path; the API is under /v1/."),
    405: ("method_not_allowed", "this path does not take this method."),
}


class QueueFullError(DominoError, RuntimeError):
    """Too many sequences wait already."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which there is likely room."""


class ShuttingDownError(DominoError, RuntimeError):
    """The server takes nothing new, or ended a sequence for that reason."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which another may have taken its place, where that is known."""


class ContextLengthError(InputError):
    """A prompt, or a prompt and its new tokens, that no slot holds."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The parameter at fault, where it is not the prompt."""


class DecodingError(DominoError, RuntimeError):
    """Decoding a sequence failed: a bug, or a machine that failed, not the request's fault."""


class ClientDisconnectedError(Exception):
    """The client closed its connection before it had its response."""


class ApiError(HTTPException):
    """What a client is told, in the shape of OpenAI's errors."""

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

    def to_json(self) -> bytes:
        """Its body."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status_code, kind)
        told = ErrorInfo(message=self.detail, type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=told).model_dump_json().encode()

    @property
    def response(self) -> Response:
        """Ready to be sent."""
        return Response(self.to_json(), self.status_code, self.headers, "application/json")


def to_api_error(error: Exception, *, request_id: str = "", param: str | None = None) -> ApiError:
    """What a client is told about any error; of a bug only the id under which it is logged."""
    message, later = str(error), None
    match error:
        case ApiError():
            return error
        case HTTPException():
            code, message = _HTTP.get(error.status_code, (None, error.detail))
            return ApiError(error.status_code, message, code=code, headers=error.headers)
        case ContextLengthError():
            status, code, param = 400, "context_length_exceeded", error.param or param
        case InputError():
            status, code = 400, "invalid_value"
        case QueueFullError():
            status, code, later = 429, "rate_limit_exceeded", error.retry_after
        case ShuttingDownError():
            status, code, later = 503, "server_stopping", error.retry_after
        case _:
            _log.error("request %s failed", request_id, exc_info=error)
            status, code = 500, "internal_error"
            message = f"the server failed on this request; its log says why under {request_id}."
    headers = None if later is None else {"Retry-After": str(max(1, math.ceil(later)))}
    return ApiError(status, message, code=code, param=param, headers=headers)


async def handle_exception(request: Request, error: Exception) -> Response:
    """The application's handler of every exception."""
    return to_api_error(error, request_id=request.state.request_id).response


@contextmanager
def at_param(name: str) -> Iterator[None]:
    """Name this parameter as the one at fault."""
    try:
        yield
    except InputError as error:
        raise to_api_error(error, param=name) from error


_Location = tuple[str | int, ...]


def from_validation(invalid: ValidationError, body: Any) -> ApiError:
    """One sentence about the first field that is wrong.

    A union is wrong in as many ways as it has members; the one that got furthest was meant.
    """
    errors: Sequence[Mapping[str, Any]] = invalid.errors(include_url=False)
    found = [(_location(error, body), error) for error in errors]
    first = found[0][0][:1]
    where, error = max((each for each in found if each[0][:1] == first), key=_progress)
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):  # of the field that decides
        where = (*where, error["ctx"]["discriminator"].strip("'"))
    param = (error.get("ctx") or {}).get("param") or _path(where) or None
    code = "invalid_value"
    match error["type"]:
        case "union_tag_invalid":
            message = f"{param} is not one of {error['ctx']['expected_tags']}."
        case "missing" | "union_tag_not_found":
            code, message = "missing_required_parameter", f"{param} is missing."
        case "extra_forbidden":
            code, message = "unknown_parameter", f"{param} is not a parameter of this endpoint."
        case "unsupported":
            code, message = "unsupported_parameter", f"{param}: {error['msg']}."
        case _:
            kinds = [each["type"] for place, each in found if place == where]
            message = f"{param or 'the body'}: {_complaint(error, kinds)}."
    return ApiError(400, message, code=code, param=param)


_KINDS = {
    "string_type": "a string", "int_type": "an integer", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip
"""What errors about the kind of a value expected, in the words of JSON."""


def _progress(found: tuple[_Location, Mapping[str, Any]]) -> tuple[int, int, int]:
    """A value of the right kind got further than one of a wrong kind."""
    where, error = found
    last = where[-1] if where else 0
    rank = 2 if error["type"] == "unsupported" else int(error["type"] not in _KINDS)
    return len(where), last if isinstance(last, int) else 0, rank


def _complaint(error: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """What was expected and what was found; `kinds` are the types of errors at this place."""
    value, more = error["input"], error.get("ctx") or {}
    if error["type"] in _KINDS:
        expected = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds if kind in _KINDS))
        return f"expected {expected}; found {_shown(value)}"
    if error["type"] in ("too_long", "too_short") and isinstance(value, Sequence | Mapping):
        most = error["type"] == "too_long"
        expected = f"at most {more['max_length']}" if most else f"at least {more['min_length']}"
        return f"has {len(value)} entries; expected {expected}"
    words = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    words = words[:1].lower() + words[1:]
    return f"{words}; found {_shown(value)}" if words.startswith("should ") else words


def _shown(value: Any) -> str:
    """A value as JSON writes it, or its kind where that is long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value) if len(value) <= 40 else f"a string of {len(value)} characters"
        case list():
            return "a list"
        case dict():
            return "an object"
    return str(value) if abs(value) < 1e30 else "a very large number"


def _location(error: Mapping[str, Any], body: Any) -> _Location:
    """Where in the body; pydantic's names for the members of a union are left out."""
    where: list[str | int] = []
    here = body
    steps = error["loc"]
    for number, step in enumerate(steps):
        named = isinstance(here, dict) and step in here
        if named or (isinstance(here, list) and isinstance(step, int) and step < len(here)):
            here = here[step]
        elif not (error["type"] == "missing" and number == len(steps) - 1):
            continue
        where.append(step)
    return tuple(where)


def _path(where: _Location) -> str:
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return words.removeprefix(".")[:200]
