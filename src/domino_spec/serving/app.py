"""The HTTP application: routes, the page, exception handlers and the OpenAPI description."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from domino_spec import __version__
from domino_spec.api.prompts import require_tokenizer
from domino_spec.errors import DominoError
from domino_spec.serving.completions import CompletionHandler, check_model, while_connected
from domino_spec.serving.errors import (
    ApiError,
    ClientDisconnectedError,
    at_param,
    from_validation,
    handle_exception,
)
from domino_spec.serving.metrics import Metrics
from domino_spec.serving.middleware import Middleware, is_open
from domino_spec.serving.protocol import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    DominoOptions,
    ErrorResponse,
    Health,
    IgnoredFields,
    ModelCard,
    ModelList,
    ServerInfo,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)
from domino_spec.serving.responses import (
    ResponseEvent,
    ResponseObject,
    ResponsesHandler,
    ResponsesRequest,
)

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
    429: "Too many sequences are waiting; Retry-After says when to come back",
    500: "A bug, or a machine that failed",
    503: "The server is going down",
}
_PAGE, _INDEX = Path(__file__).with_name("page"), "index.html"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but revalidated: an upgrade shows at once
}


def make_app(service: Service, *, metrics: Metrics) -> FastAPI:
    """The service over HTTP. The metrics are those that the service's engine writes to."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await service.stop(service.config.drain_seconds)

    # FastAPI's own pages of documentation load scripts from elsewhere.
    app = FastAPI(
        title="domino-spec",
        version=__version__,
        summary="OpenAI's completions, decoded with drafts.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for kind in (HTTPException, DominoError):
        app.add_exception_handler(kind, handle_exception)
    handler = CompletionHandler(service)
    posted = post_routes(service, handler)
    app.router.routes += posted
    app.add_middleware(
        Middleware,
        config=service.config,
        metrics=metrics,
        posted={route.path: route for route in posted},
    )
    app.include_router(info_routes(service, metrics))
    if service.config.page:
        app.include_router(page_routes())
    _describe(app, service)
    return app


# Routes -------------------------------------------------------------------------------------------


class JsonRoute(APIRoute):
    """A route whose body is one JSON object, the endpoint's one argument.

    FastAPI describes it and refuses other methods; its way to an endpoint would take as long as
    all of ours.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        response: type[BaseModel],
        *,
        strict: bool,
    ) -> None:
        """With `strict` unknown fields are refused, else ignored, which a header tells."""
        content: dict[str, Any] = {"text/event-stream": {}} if path in _CHUNKS else {}
        found = {"model": response, "description": response.__doc__, "content": content}
        responses = {200: found, **_errors(*_ERRORS)}
        super().__init__(path, endpoint, methods=["POST"], response_model=None, responses=responses)
        model: type[BaseModel] = get_type_hints(endpoint)["request"]

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            value = await _read_json(scope, receive)
            ignored = None if strict else IgnoredFields()
            scope["state"]["ignored_fields"] = ignored
            try:
                request = model.model_validate(value, context=ignored)
            except ValidationError as error:
                raise from_validation(error, value) from error
            # From here on: tokenising may wait too.
            response = await while_connected(receive, endpoint(request))
            if isinstance(response, BaseModel):
                response = Response(response.model_dump_json(), media_type="application/json")
            await response(scope, receive, send)

        self.app = handle


async def _read_json(scope: Scope, receive: Receive) -> dict[str, Any]:
    """The body, if it says that it is JSON.

    No page of another site can send such a body: a browser asks for permission to send JSON across
    sites, and gets none here. The parser takes no NaN, no half of a surrogate pair, no bytes that
    are not UTF-8 and nothing nested without end.
    """
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind[:80]!r}; expected application/json.",
            code="unsupported_media_type",
        )
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if not body:
        raise ApiError(400, "the body is empty; expected a JSON object.", code="invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(
            400, f"the body is not JSON that can be read: {error}.", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        found = f"the body is a JSON {type(value).__name__}; expected an object."
        raise ApiError(400, found, code="invalid_json")
    return value


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    # By reference: for a model FastAPI makes a validator for each status of each path.
    content = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
    return {status: {"content": content, "description": _ERRORS[status]} for status in statuses}


def post_routes(service: Service, handler: CompletionHandler) -> list[JsonRoute]:
    """The endpoints that decode, and vLLM's for text to tokens and back."""
    config = service.config

    async def tokenize(request: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text, or of a chat through the target's template."""
        check_model(request.model, config.model)
        special = request.add_special_tokens is not False
        if request.prompt is None:
            tokens, _ = await handler.encode(request)
        else:
            with at_param("prompt"):
                tokens = await service.encode_text(request.prompt, add_special_tokens=special)
        names = None
        if request.return_token_strs:
            tokenizer = require_tokenizer(service.tokenizer)
            names = list(map(str, tokenizer.convert_ids_to_tokens(tokens)))
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=service.limits.context,
            tokens=tokens,
            token_strs=names,
        )

    async def detokenize(request: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        check_model(request.model, config.model)
        with at_param("tokens"):
            return DetokenizeResponse(prompt=await service.decode_tokens(request.tokens))

    route = partial(JsonRoute, strict=config.strict)
    return [
        route("/v1/chat/completions", handler.chat_completions, ChatCompletionResponse),
        route("/v1/completions", handler.completions, CompletionResponse),
        route("/v1/responses", ResponsesHandler(handler).responses, ResponseObject),
        route("/tokenize", tokenize, TokenizeResponse),
        route("/detokenize", detokenize, DetokenizeResponse),
    ]


def info_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Models, health and metrics."""
    routes, errors = APIRouter(), _errors(401, 403, 404, 413, 500)
    name = service.config.model
    card = ModelCard(
        id=name,
        object="model",
        created=service.created,
        owned_by="domino-spec",
        max_model_len=service.limits.context,
    )

    @routes.get("/v1/models", responses=errors)
    async def list_models() -> ModelList:
        """The served model."""
        return ModelList(object="list", data=[card])

    @routes.get("/v1/models/{name:path}", responses=errors)
    async def get_model(name: str) -> ModelCard:
        """The served model, by its name."""
        check_model(name, card.id)
        return card

    @routes.get("/v1/domino", responses=errors)
    async def get_info() -> ServerInfo:
        """Target, drafter, sizes and device."""
        return service.info()

    @routes.get("/tokenizer_info", responses=errors)
    async def get_tokenizer_info() -> TokenizerInfo:
        """The tokenizer's kind, its special tokens and its chat template."""
        tokenizer = service.tokenizer
        if tokenizer is None:
            raise HTTPException(404)
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        found = {name: getattr(tokenizer, name, None) for name in names}
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            **{name: each if each is None else str(each) for name, each in found.items()},
        )

    @routes.get("/version", responses=errors)
    async def get_version() -> Version:
        """The server's version."""
        return Version(version=__version__)

    async def get_health() -> Response:
        """Whether requests are taken."""
        state = service.engine.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    healthy: dict[int | str, dict[str, Any]] = {
        200: {"model": Health, "description": "Requests are taken"},
        503: {"model": Health, "description": "They are not"},
        **_errors(403, 413, 500),
    }
    for path in ("/health", "/ping"):
        how: dict[str, Any] = {"response_model": None, "name": path.strip("/")}
        routes.add_api_route(path, get_health, methods=["GET"], responses=healthy, **how)
        other = ["HEAD"] if path == "/health" else ["HEAD", "POST"]  # some balancers post
        routes.add_api_route(path, get_health, methods=other, include_in_schema=False, **how)

    text: dict[str, Any] = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @routes.get(
        "/metrics", response_model=None, responses={200: text, **errors}, response_class=Response
    )
    async def get_metrics() -> Response:
        """Prometheus metrics."""
        return Response(metrics.render(), media_type=metrics.media_type)

    return routes


def page_routes() -> APIRouter:
    """The chat page at `/` and its files; they need no key, since the page asks for one."""
    routes, files = APIRouter(include_in_schema=False), StaticFiles(directory=_PAGE)
    names = {path.name for path in _PAGE.iterdir()} - {_INDEX}  # it names its files from the root

    async def get(name: str, request: Request) -> Response:
        response = await files.get_response(name, request.scope)
        response.headers.update(_PAGE_HEADERS)
        if name.endswith(".js") and "content-type" in response.headers:  # systems disagree on it
            response.headers["content-type"] = "text/javascript; charset=utf-8"
        return response

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def get_page(request: Request) -> Response:
        return await get(_INDEX, request)

    @routes.api_route("/page/{file}", methods=["GET", "HEAD"])
    async def get_page_file(request: Request, file: str) -> Response:
        if file not in names:
            raise HTTPException(404)
        return await get(file, request)

    return routes


# OpenAPI ------------------------------------------------------------------------------------------

_REF = "#/components/schemas/{model}"
_CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": CompletionChunk,
    "/v1/responses": ResponseEvent,
}


def _describe(app: FastAPI, service: Service) -> None:
    """FastAPI's description, with what this server allows and without errors it never sends."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(generate(), service)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], service: Service) -> None:
    config, schemas = service.config, schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for model in (ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        fields = schemas[model.__name__]["properties"]
        fields["model"]["enum"] = [config.model]
        if "n" in fields:
            fields["n"]["anyOf"][0]["maximum"] = config.max_choices
    for other in (TokenizeRequest, DetokenizeRequest):
        schemas[other.__name__]["properties"]["model"]["anyOf"][0]["enum"] = [config.model]
    if not config.strict:  # as `StrictModel.path` says
        for each in schemas.values():
            if each.get("title") != DominoOptions.__name__:
                each.pop("additionalProperties", None)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if config.api_keys and not is_open(path):
                operation["security"] = [{"key": []}]
    outside: list[type[BaseModel]] = [*_CHUNKS.values(), ErrorResponse]
    for each in outside:
        described = each.model_json_schema(ref_template=_REF)
        schemas.update(described.pop("$defs"))
        schemas[each.__name__] = described
    for path, kind in _CHUNKS.items():
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"itemSchema": _event_schema(kind)}
    if config.api_keys:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}


def _event_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """An event under the name of its type; or a chunk or an error, and at last [DONE]."""
    told, error = ({"$ref": _REF.format(model=each.__name__)} for each in (kind, ErrorResponse))
    data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": told}
    fields = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    if kind is not ResponseEvent:
        data["contentSchema"] = {"anyOf": [told, error]}
        fields = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}}
    return {"type": "object", "required": [*fields], "properties": fields}
