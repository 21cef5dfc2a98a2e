"""Answers from any OpenAI-compatible server that runs the target."""

from __future__ import annotations

import http.client
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from domino_spec.data.answer import Answer, NextRequest, Request
from domino_spec.data.chat import CUT, ChatEncoder, Message
from domino_spec.data.files import BadRow
from domino_spec.errors import DataError

_TRY_AGAIN = frozenset({408, 409, 425, 429})
_THIS_PROMPT = frozenset({400, 413, 422})
_LONGEST_WAIT = 30.0


def open_url(request: urllib.request.Request, *, timeout: float) -> Any:
    """The reply; no proxy stands between two programs of this machine."""
    host = urlsplit(request.full_url).hostname or ""
    try:
        is_local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        is_local = False
    if is_local:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return direct.open(request, timeout=timeout)
    return urllib.request.urlopen(request, timeout=timeout)


class ServerAnswerer:
    """Asks /v1/chat/completions, many prompts at once, waiting out what passes.

    Answers come back as text and are tokenised through the target's own chat template.
    """

    def __init__(
        self,
        url: str,
        *,
        tokenizer: Any,
        chat_options: Mapping[str, Any] | None = None,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 32,
        retries: int = 6,
        first_wait: float = 0.5,
        timeout: float = 600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise DataError(f"the server is {url!r}; expected a URL such as http://host:8000.")
        if concurrency < 1:
            raise DataError(f"concurrency is {concurrency}; expected 1 or more.")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._encoder = ChatEncoder(tokenizer, chat_options)
        self._tokenizer = tokenizer
        self._options = dict(chat_options or {})
        self._key = api_key
        self._concurrency, self._retries = concurrency, retries
        self._first_wait, self._timeout = first_wait, timeout
        self._stopping = threading.Event()
        self.model = model or self._only_model()

    def prompt_tokens(self, messages: list[Message]) -> int:
        """How long a prompt is."""
        text = self._encoder.render(messages, open_turn=True)
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, next_request: NextRequest) -> Iterator[tuple[Request, Answer]]:
        """Answers as they come, with as many requests at a time as the server is to work on."""
        pool = ThreadPoolExecutor(max_workers=self._concurrency)
        running: dict[Future[Answer], Request] = {}
        try:
            while True:
                while len(running) < self._concurrency and (request := next_request()) is not None:
                    running[pool.submit(self._one, request)] = request
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BaseException:
            self._stopping.set()  # ends the waits between tries
            raise
        finally:
            pool.shutdown(wait=not self._stopping.is_set(), cancel_futures=True)

    def _one(self, request: Request) -> Answer:
        params = request.params
        body: dict[str, Any] = {
            "model": self.model,
            "messages": request.messages,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
        }
        if params.top_k:
            body["top_k"] = params.top_k
        if self._options:
            body["chat_template_kwargs"] = self._options
        reply = self._ask("/chat/completions", body)
        if isinstance(reply, str):
            return Answer.none(reply)
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._base} answered with {json.dumps(reply)[:80]}; expected choices with a "
                "message and a finish_reason. Is it an OpenAI-compatible server?"
            ) from error
        if message.get("reasoning_content") or message.get("reasoning"):
            raise DataError(
                f"{self._base} takes the thinking out of its answers, so their tokens cannot be "
                "told; start it without a reasoning parser."
            )
        return self._encoded(request.messages, text, finished=reason != CUT)

    def _encoded(self, messages: list[Message], text: str, *, finished: bool) -> Answer:
        if not text.strip():
            return Answer.none("the server's answer is empty")
        answered = [*messages, {"role": "assistant", "content": text}]
        try:
            if text.strip() not in self._encoder.render(answered):
                return Answer.none("the chat template does not repeat the answer as it is")
            chat = self._encoder.encode(answered)
            if not finished:
                chat = self._encoder.without_end(chat)
        except BadRow as reason:
            return Answer.none(str(reason))
        history = np.flatnonzero(~chat.supervised)
        start = int(history[-1]) + 1 if len(history) else 0
        return Answer(chat.tokens[:start], chat.tokens[start:], text, finished)

    def _only_model(self) -> str:
        reply = self._ask("/models", None)
        try:
            return str(reply["data"][0]["id"])  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise DataError(
                f"{self._base} does not say which model it serves; name it with --server-model."
            ) from error

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any] | str:
        """The reply, or why this prompt was refused; what may pass is tried again."""
        last, wait = "", self._first_wait
        for attempt in range(self._retries + 1):
            if attempt and self._stopping.wait(wait * random.uniform(0.75, 1.25)):
                break
            wait = min(wait * 2, _LONGEST_WAIT)
            try:
                with open_url(self._request(path, body), timeout=self._timeout) as r:
                    reply = json.loads(r.read())
                if isinstance(reply, dict):
                    return reply
                last = f"answered with {type(reply).__name__}"
            except urllib.error.HTTPError as error:
                said = _said(error)
                if error.code in _THIS_PROMPT and body is not None:
                    return f"the server refused it ({error.code} {said[:60]})"
                last = f"answered {error.code} {said}"
                if error.code not in _TRY_AGAIN and error.code < 500:
                    raise DataError(
                        f"{self._base}{path} {last}; check the URL, the model's name and the API "
                        "key."
                    ) from error
                wait = max(wait, min(_seconds(error.headers.get("Retry-After")), _LONGEST_WAIT))
            except (OSError, http.client.HTTPException, ValueError) as error:
                last = f"failed: {getattr(error, 'reason', None) or error or type(error).__name__}"
        raise DataError(
            f"{self._base}{path} {last}, {self._retries + 1} times; when it is back, run the same "
            "command again to go on."
        )

    def _request(self, path: str, body: Mapping[str, Any] | None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(self._base + path, data=data, headers=headers)


def _said(error: urllib.error.HTTPError) -> str:
    """What the server says about it, in a line."""
    try:
        text = error.read().decode("utf-8", errors="replace")
    except OSError:
        return str(error.reason)
    try:
        values = json.loads(text)
        inner = values.get("error", values)
        text = inner.get("message", text) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text or error.reason).split())[:160]


def _seconds(value: str | None) -> float:
    try:
        return max(float(value or 0), 0.0)
    except ValueError:
        return 0.0
