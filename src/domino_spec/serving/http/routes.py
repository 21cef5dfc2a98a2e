"""The paths of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from domino_spec.errors import InputError
from domino_spec.serving.http.answered import (
    ChatReply,
    Facts,
    Health,
    Model,
    Models,
    TextReply,
)
from domino_spec.serving.http.answering import Answering
from domino_spec.serving.http.asked import Asked, ChatAsked, CompletionAsked
from domino_spec.serving.http.asking import Asking
from domino_spec.serving.http.body import JsonRoute
from domino_spec.serving.http.errors import ApiError, ErrorReply
from domino_spec.serving.http.forms import ChatForm, Form, TextForm
from domino_spec.serving.http.metrics import PrometheusMeter
from domino_spec.serving.http.pieces import TokenNames

if TYPE_CHECKING:
    from domino_spec.serving.service import Service

_ERRORS = {
    400: "Something in the request makes no sense, or is not supported",
    401: "The API key is missing or wrong",
    403: "The request was sent to a host that this server does not serve",
    404: "There is no such model or path",
    408: "The body took too long to come",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too many answers are waiting; Retry-After says when to come back",
    500: "A bug, or a machine that failed",
    503: "The server is going down",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses, in OpenAI's shape, for the API's description."""
    return {status: {"model": ErrorReply, "description": _ERRORS[status]} for status in statuses}


_ASKING = errors(*_ERRORS)
_LOOKING = errors(401, 403, 404, 413, 500)
_EVENTS: dict[str, Any] = {"text/event-stream": {}}


def completion_routes(service: Service) -> APIRouter:
    """Answers to chats and to plain prompts."""
    routes = APIRouter(prefix="/v1", route_class=JsonRoute)
    asking = Asking(service)
    known = TokenNames(service.tokenizer) if service.tokenizer is not None else None

    def form_of(kind: type[Form], asked: Asked) -> Form:
        if known is None:
            raise InputError("the model came without a tokenizer, so its answers have no text.")
        options = asked.stream_options
        show_usage = bool(options and options.include_usage)
        return kind(service.settings.model, known, show_usage=show_usage)

    @routes.post(
        "/chat/completions",
        response_model=None,
        responses={
            200: {"model": ChatReply, "content": _EVENTS, "description": "The answers"},
            **_ASKING,
        },
    )
    async def chat(asked: ChatAsked) -> Response:
        """Answer a chat; with `stream`, in server-sent events as blocks are committed."""
        form = form_of(ChatForm, asked)
        return Answering(service, asked, await asking.chat(asked), form)

    @routes.post(
        "/completions",
        response_model=None,
        responses={
            200: {"model": TextReply, "content": _EVENTS, "description": "The answers"},
            **_ASKING,
        },
    )
    async def completions(asked: CompletionAsked) -> Response:
        """Go on with a text, or several, or with token ids."""
        form = form_of(TextForm, asked)
        return Answering(service, asked, await asking.completion(asked), form)

    return routes


def looking_routes(service: Service, meter: PrometheusMeter) -> APIRouter:
    """What is here and how it does."""
    routes = APIRouter()
    model: Model = {
        "id": service.settings.model,
        "object": "model",
        "created": service.created,
        "owned_by": "domino-spec",
    }

    @routes.get("/v1/models", responses=_LOOKING)
    async def models() -> Models:
        """The one model."""
        return {"object": "list", "data": [model]}

    @routes.get("/v1/models/{name:path}", responses=_LOOKING)
    async def one_model(name: str) -> Model:
        """It, by its name."""
        if name != model["id"]:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here; this server has {model['id']!r}.",
                code="model_not_found",
                param="model",
            )
        return model

    @routes.get("/v1/domino", responses=_LOOKING)
    async def facts() -> Facts:
        """What is decoded with what, and where."""
        return service.facts()  # type: ignore[return-value]

    @routes.get(
        "/health",
        response_model=None,
        responses={
            200: {"model": Health, "description": "Requests are taken"},
            503: {"model": Health, "description": "They are not"},
            **errors(403, 413, 500),
        },
    )
    async def health() -> Response:
        """Whether requests are taken."""
        state = service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @routes.get(
        "/metrics",
        response_model=None,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **_LOOKING,
        },
        response_class=Response,
    )
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(meter.page(), media_type=meter.media_type)

    return routes
