"""Answers a request, whole or as server-sent events, for as long as its client listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput
from domino_spec.serving.http.asked import Asked
from domino_spec.serving.http.choices import Choice, usage_of
from domino_spec.serving.http.errors import (
    ClientGoneError,
    as_api_error,
    blaming,
    request_id_of,
)
from domino_spec.serving.http.forms import Chunk, Form
from domino_spec.serving.http.guard import client_of

if TYPE_CHECKING:
    from domino_spec.serving.async_engine import OutputStream
    from domino_spec.serving.service import Service

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class Answering(Response):
    """The response to a request that was understood.

    Nothing is sent before the first event: until then an error still has its own status.
    """

    def __init__(
        self, service: Service, asked: Asked, sequences: Sequence[Decoded], form: Form
    ) -> None:
        super().__init__()
        self._service = service
        self._sequences = sequences
        self._form = form
        self._stream = bool(asked.stream)
        self._n = asked.n or 1
        self._show_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._choices = [
            Choice(index, sequence, form.names, scores=asked.scores, blocks=asked.ours.blocks)
            for index, sequence in enumerate(sequences)
        ]
        self._opened: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_listening(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope)
        try:
            with blaming(self._form.prompt):
                outputs = self._service.submit(self._sequences, client=client_of(scope))
        except Exception as error:
            await as_api_error(error, request_id=request_id).response(scope, receive, send)
            return
        async with outputs:
            if self._stream:
                await self._send_stream(outputs, request_id, scope, receive, send)
            else:
                response = await self._whole(outputs, request_id)
                await response(scope, receive, send)

    async def _whole(self, outputs: OutputStream, request_id: str) -> Response:
        try:
            async for output in outputs:
                self._take(output)
        except Exception as error:
            return as_api_error(error, request_id=request_id).response
        return JSONResponse(self._form.whole(self._choices, self._usage()))

    async def _send_stream(
        self, outputs: OutputStream, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        started = False
        try:
            async with aclosing(self._chunks(outputs)) as chunks:
                async for chunk in chunks:
                    if not started:
                        started = True
                        await send(_START)
                    await send(_body(_event(chunk)))
        except Exception as error:
            told = as_api_error(error, request_id=request_id)
            if not started:
                await told.response(scope, receive, send)
                return
            await send(_body(_event(told.reply)))
        await send(_body(DONE, more=False))

    async def _chunks(self, outputs: OutputStream) -> AsyncGenerator[Chunk, None]:
        async for output in outputs:
            for chunk in self._take(output):
                yield chunk
        if self._show_usage:
            yield self._form.counts(self._usage())

    def _take(self, output: SequenceOutput) -> list[Chunk]:
        """What this output adds to a stream."""
        if output.error is not None:
            raise output.error
        form, choice = self._form, self._choices[output.sequence.index]
        pieces = [choice.take(output)]
        if output.finish_reason is not None:
            pieces.append(choice.end(output))
        if not self._stream:
            return []
        chunks: list[Chunk | None] = []
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            chunks.append(form.opening(choice))
        chunks += [form.delta(choice, piece) for piece in pieces if not piece.empty]
        if output.finish_reason is not None:
            chunks.append(form.closing(choice))
        return [chunk for chunk in chunks if chunk is not None]

    def _usage(self) -> Any:
        return usage_of(self._choices, self._sequences, n=self._n)


async def while_listening(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do this unless the client hangs up, whatever it is waiting for at that moment."""
    doing = asyncio.ensure_future(work)
    hearing = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((doing, hearing), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGoneError
    finally:
        doing.cancel()
        hearing.cancel()
        await asyncio.gather(doing, hearing, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"x-accel-buffering", b"no"),  # or a proxy would save blocks up
    ],
}


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _event(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
