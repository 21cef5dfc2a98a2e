"""The application: routes, and the guard before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from domino_spec import __version__
from domino_spec.errors import DominoError
from domino_spec.serving.http.description import describe
from domino_spec.serving.http.errors import answer_error
from domino_spec.serving.http.guard import Guard
from domino_spec.serving.http.metrics import PrometheusMeter
from domino_spec.serving.http.routes import completion_routes, looking_routes

if TYPE_CHECKING:
    from domino_spec.serving.service import Service


def make_app(service: Service, *, meter: PrometheusMeter) -> FastAPI:
    """The service over HTTP. The meter is the one that the service's engine tells."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop(service.settings.drain_seconds)

    # Its own pages of documentation load scripts from elsewhere.
    app = FastAPI(
        title="domino-spec",
        version=__version__,
        summary="OpenAI's completions, decoded with drafts.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for kind in (HTTPException, RequestValidationError, DominoError):
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(Guard, settings=service.settings, counter=meter)
    app.include_router(completion_routes(service))
    app.include_router(looking_routes(service, meter))
    if service.settings.page:
        _include_page(app)
    describe(app, service)
    return app


def _include_page(app: FastAPI) -> None:
    from domino_spec.serving.http.page import page_router

    app.include_router(page_router())
