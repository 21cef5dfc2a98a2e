"""The chat page and its files, under a policy that lets nothing else in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked about each time: an upgrade shows at once
}


@dataclass(frozen=True)
class _File:
    content: bytes
    kind: str
    tag: str


@cache
def _shelf() -> dict[str, _File]:
    """Every file of the page by its name; nothing else can be asked for."""
    found = {}
    for entry in files("domino_spec.serving").joinpath("page").iterdir():
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[entry.name] = _File(content, kind, tag)
    return found


def _known(request: Request, tag: str) -> bool:
    """Whether the browser has this very file already."""
    asked = request.headers.get("if-none-match", "")
    return any(part.strip().removeprefix("W/") in (tag, "*") for part in asked.split(","))


def _answer(request: Request, name: str) -> Response:
    found = _shelf().get(name)
    if found is None:
        raise HTTPException(404, "The page has no file of this name.")
    headers = {**_HEADERS, "ETag": found.tag}
    if _known(request, found.tag):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)


def page_router() -> APIRouter:
    """`/` and `/page/{file}`; open to everybody, since a key is asked for by the page itself."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, INDEX)

    @router.api_route("/page/{file}", methods=["GET", "HEAD"])
    async def file(request: Request, file: str) -> Response:
        # The index names its files from the root; under /page/ it would look for them in vain.
        return _answer(request, "" if file == INDEX else file)

    return router
