"""A server that says what a script tells it to: our HTTP contract without a model."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from domino_spec.serving.app import page_routes

FACTS = {
    "model": "tiny-target",
    "draft": "tiny-drafter",
    "speculates": True,
    "slots": 8,
    "context": 4096,
    "version": "0.1.0",
    "device": "cpu",
}


@dataclass(frozen=True)
class Scene:
    """What follows a prompt: blocks of (text, accepted, probability); the first is the prompt's."""

    blocks: list[list[tuple[str, bool, float]]]
    rejected: int = 0
    finish: str = "stop"
    plain: list[list[tuple[str, bool, float]]] | None = None
    """What it writes without drafts; None is the same text, a token a cycle."""
    hold_after: int | None = None
    """Blocks after which it waits for the gate, with drafts."""
    hold_plain_after: int | None = None
    """The same without drafts."""
    break_after: int | None = None
    """Blocks after which the answer fails."""
    drop_after: int | None = None
    """Blocks after which the connection is cut."""
    reasoning: int = 0
    """Blocks that are reasoning."""
    refusal: tuple[int, str, dict[str, str]] | None = None
    pace: float = 0.0

    def lane(self, *, speculate: bool) -> list[list[tuple[str, bool, float]]]:
        if speculate:
            return self.blocks
        if self.plain is not None:
            return self.plain
        return [[(text, False, p)] for block in self.blocks for text, _, p in block]


@dataclass
class ChatServer:
    """What it was asked, who left, and the gate at which answers may be held."""

    scenes: dict[str, Scene]
    facts: dict[str, Any] = field(default_factory=lambda: dict(FACTS))
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def refusal(self, request: Request) -> JSONResponse | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return error(401, "This server wants an API key it knows.")

    async def stream(self, body: dict[str, Any]) -> Any:
        """The answer; a client that does not read it to the end has left."""
        prompt = body["messages"][-1]["content"]
        try:
            async for part in self.play(self.scenes[prompt], body):
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self.left.append(prompt)
            raise

    async def play(self, scene: Scene, body: dict[str, Any]) -> Any:
        speculate = body.get("domino", {}).get("speculate", True)
        hold = scene.hold_after if speculate else scene.hold_plain_after
        position = accepted = 0
        for cycle, block in enumerate(scene.lane(speculate=speculate)):
            if cycle == scene.break_after:
                yield event(
                    {"error": {"message": "Decoding failed: out of dominoes.", "code": 500}}
                )
                yield "data: [DONE]\n\n"
                return
            while hold == cycle and not self.gate.is_set():
                await asyncio.sleep(0.005)
            if cycle == scene.drop_after:
                raise ConnectionError("cut on purpose")
            await asyncio.sleep(scene.pace)
            tokens = [
                {"id": token_id(text), "text": text, "accepted": was_draft,
                 "position": position + i, "probability": p,
                 "lost": [" lazy", " slow dog", " cat"] if was_draft else []}
                for i, (text, was_draft, p) in enumerate(block)
            ]  # fmt: skip
            position += len(block)
            accepted += sum(was_draft for _, was_draft, _ in block)
            last = position == sum(map(len, scene.lane(speculate=speculate)))
            shown = "".join(text for text, _, _ in block if not text.startswith("<|"))
            name = "reasoning_content" if cycle < scene.reasoning else "content"
            choice = {"index": 0, "delta": {name: shown}, "finish_reason": None}
            blocks = {"choice": 0, "cycle": cycle, "accepted": sum(t["accepted"] for t in tokens)}
            yield event({"choices": [choice], "domino": {**blocks, "tokens": tokens}})
            if last:
                yield event({"choices": [{**choice, "delta": {}, "finish_reason": scene.finish}]})
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": scene.rejected if speculate else 0,
        }
        usage = {"completion_tokens": position, "completion_tokens_details": details}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page_routes())

        @app.get("/v1/domino")
        async def domino(request: Request) -> Any:
            return self.refusal(request) or self.facts

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            if refused := self.refusal(request):
                return refused
            body = await request.json()
            self.asked.append(body)
            scene = self.scenes[body["messages"][-1]["content"]]
            if scene.refusal is not None:
                status, words, headers = scene.refusal
                return error(status, words, headers)
            return StreamingResponse(self.stream(body), media_type="text/event-stream")

        return app


def token_id(text: str) -> int:
    return zlib.crc32(text.encode()) % 50_000


def event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def error(status: int, words: str, headers: dict[str, str] | None = None) -> JSONResponse:
    body = {"error": {"message": words, "type": "error", "param": None, "code": None}}
    return JSONResponse(body, status_code=status, headers=headers)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The app on a free port of this machine, in a thread; gives its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()


@contextmanager
def chatting(server: ChatServer) -> Iterator[ChatServer]:
    """The script on stage."""
    with listening(server.app()) as server.url:
        yield server
