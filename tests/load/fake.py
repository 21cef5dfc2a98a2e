"""A server that misbehaves as it is told: `{"fake": NAME}` in a body picks a behaviour."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

TEXT = ["A", "ü€", "𝄞!", " z"]
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 7,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 9},
}
FACTS = {"model": "tiny", "draft": "d", "speculates": True, "slots": 4, "version": "0.1.0",
         "device": "cpu"}  # fmt: skip


class FakeServer:
    """Raw HTTP/1.1, so that a test decides what stands in which packet."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.most_at_once = 0
        self.port = 0
        self.ours = True
        self._now = 0
        self._turns = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.headers.append(head)
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(lines.get("content-length", 0)))
                if head.startswith("GET"):
                    self._tell(head.split()[1], writer)
                    continue
                asked = json.loads(body)
                self.bodies.append(asked)
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                try:
                    await self._answer(asked, head.split()[1], writer)
                finally:
                    self._now -= 1
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            whole(writer, 200, {"data": [{"id": "org/tiny"}]})
        elif path == "/v1/domino" and self.ours:
            whole(writer, 200, FACTS)
        else:
            whole(writer, 404, {"error": {"message": "nothing here"}})

    async def _answer(self, asked: dict[str, Any], path: str, writer: Any) -> None:
        kinds = asked.get("fake", "normal").split()
        kind = kinds[self._turns % len(kinds)]
        self._turns += 1
        if kind == "busy":
            whole(writer, 429, {"error": {"message": "come back"}}, "Retry-After: 3\r\n")
        elif kind == "busy-without":
            whole(writer, 429, {"error": {"message": "come back"}})
        elif kind == "crash":
            whole(writer, 500, {"error": {"message": "oh no"}})
        elif kind == "gone":
            writer.close()
        elif not asked["stream"] or kind == "json":
            whole(writer, 200, answer(path))
        else:
            await self._stream(kind, path, writer)

    async def _stream(self, kind: str, path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if kind == "silent":
            await asyncio.sleep(3600)
        async for part in parts(kind, path):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            if kind == "bytes":
                await asyncio.sleep(0)
        if kind == "cut":
            writer.close()
            return
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def parts(kind: str, path: str) -> AsyncIterator[bytes]:
    """The pieces of a stream, as they go over the wire."""
    whole_stream = b"".join(event(e) for e in events(kind, path))
    if kind == "bytes":  # inside characters too
        for i in range(0, len(whole_stream), 3):
            yield whole_stream[i : i + 3]
        return
    for each in events(kind, path):
        yield event(each)


def events(kind: str, path: str) -> list[Any]:
    chat = path.endswith("/chat/completions")
    key = "delta" if chat else "text"
    said: list[Any] = [": hello"] if kind == "comments" else []
    if chat:
        said.append(chunk(key, {"role": "assistant", "content": ""}))
    for number, text in enumerate(TEXT):
        piece = chunk(key, {"content": text} if chat else text)
        if kind == "blocks":
            piece["domino"] = {"tokens": [{"id": 1}] * (2 if number else 1)}
        if kind == "logprobs":
            listed = [{"token": "x"}] * (2 if number else 1)
            piece["choices"][0]["logprobs"] = {"content" if chat else "tokens": listed}
        if kind == "continuous":
            piece["usage"] = {"completion_tokens": 1 + 2 * number}
        said.append(piece)
    if kind == "cut":
        return said[:-2]
    if kind == "endless":
        return [*said, "[DONE]"]
    if kind == "rubbish":
        return [*said, "{not json", "[DONE]"]
    if kind == "latin":
        return [*said, b"data: \xff\xfe\n\n"]
    if kind == "failed":
        return [*said[:3], {"error": {"message": "out of luck"}}, "[DONE]"]
    said.append(chunk(key, {} if chat else "", finish="stop"))
    if kind != "uncounted":
        said.append({"choices": [], "usage": USAGE})
    return said if kind == "no-mark" else [*said, "[DONE]"]


def chunk(key: str, value: Any, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, key: value, "finish_reason": finish}]}


def event(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith(":"):
        return f"{value}\r\n\r\n".encode()
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\r\n\r\n".encode()


def answer(path: str) -> dict[str, Any]:
    text = "".join(TEXT)
    said = {"message": {"content": text}} if "chat" in path else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": "length", **said}], "usage": USAGE}


def whole(writer: asyncio.StreamWriter, status: int, reply: Any, headers: str = "") -> None:
    body = json.dumps(reply).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


@contextmanager
def running() -> Iterator[FakeServer]:
    """In a thread of its own."""
    fake, ready, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
