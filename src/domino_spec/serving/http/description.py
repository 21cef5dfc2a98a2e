"""The OpenAPI description, true of this very server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from domino_spec.serving.http.answered import ChatChunk, TextChunk
from domino_spec.serving.http.guard import is_open

if TYPE_CHECKING:
    from domino_spec.serving.service import Service

_REF = "#/components/schemas/{model}"
_STREAMS: dict[str, Any] = {"/v1/chat/completions": ChatChunk, "/v1/completions": TextChunk}
_BODIES = ("ChatAsked", "CompletionAsked")


def describe(app: FastAPI, service: Service) -> None:
    """FastAPI's description, less the errors it would have sent, with what is allowed here."""
    usual = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _mend(usual(), service)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _mend(page: dict[str, Any], service: Service) -> None:
    settings, schemas = service.settings, page["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in _BODIES:
        fields = schemas[name]["properties"]
        fields["model"]["enum"] = [settings.model]
        fields["n"]["anyOf"][0]["maximum"] = settings.max_choices
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if settings.api_keys and not is_open(path):
                operation["security"] = [{"key": []}]
    for path, kind in _STREAMS.items():
        chunk = TypeAdapter(kind).json_schema(ref_template=_REF)
        schemas.update(chunk.pop("$defs"))
        schemas[kind.__name__] = chunk
        content = page["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"] = {"itemSchema": _event(kind.__name__)}
    if settings.api_keys:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}


def _event(chunk: str) -> dict[str, Any]:
    """A chunk, or an error, and at last the word [DONE]."""
    either = [{"$ref": _REF.format(model=name)} for name in (chunk, "ErrorReply")]
    told = {"contentMediaType": "application/json", "contentSchema": {"anyOf": either}}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, told]}},
    }
