"""The completions endpoints: requests become sequences, their outputs a response or a stream."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from domino_spec import __version__
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput, TextStream, TokenScore
from domino_spec.errors import InputError
from domino_spec.serving import protocol
from domino_spec.serving.errors import ApiError, ClientDisconnectedError, at_param, to_api_error
from domino_spec.serving.middleware import client_of
from domino_spec.serving.protocol import (
    BaseRequest,
    BlockToken,
    ChatCompletionRequest,
    CompletionRequest,
    DominoBlock,
    FinishReason,
    Usage,
)
from domino_spec.serving.tokenization import TokenTexts

if TYPE_CHECKING:
    from domino_spec.serving.async_engine import OutputStream
    from domino_spec.serving.service import Service

T = TypeVar("T")
FINGERPRINT = f"domino-spec-{__version__}"
_SEEDS = 2**62
_NO_LOGPROB = -9999.0
"""What OpenAI writes for a probability of 0; JSON has no infinity."""
_DONE = b"data: [DONE]\n\n"
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"x-accel-buffering", b"no"),  # or a proxy would hold chunks back
    ],
}

# Requests -----------------------------------------------------------------------------------------


class CompletionHandler:
    """Handles requests of both endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._texts = None if service.tokenizer is None else TokenTexts(service.tokenizer)

    async def chat_completions(self, request: ChatCompletionRequest) -> SequencesResponse:
        """Complete a chat; with `stream`, in server-sent events as blocks are committed."""
        service = self._service
        self._check(request, 1)
        template = str(getattr(service.tokenizer, "chat_template", None) or "")
        options = request.chat_template_kwargs or {}
        _check_template_kwargs(options, template, service.tokenizer)
        messages = [message.to_template() for message in request.messages]
        if "developer" not in template:  # OpenAI's newer name; most templates know the old one
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        with at_param("messages"):
            prompt = await service.encode_chat(messages, options)
        return self._respond(request, [prompt], ChatFormat)

    async def completions(self, request: CompletionRequest) -> SequencesResponse:
        """Complete a text, or several, or token ids."""
        self._check(request, len(request.prompts))
        prompts: list[Sequence[int]] = []
        with at_param("prompt"):
            for prompt in request.prompts:
                if isinstance(prompt, str):
                    prompts.append(await self._service.encode_text(prompt))
                else:
                    prompts.append(prompt)
        return self._respond(request, prompts, CompletionFormat)

    def _check(self, request: BaseRequest, prompts: int) -> None:
        config, count = self._service.config, prompts * request.num_choices
        check_model(request.model, config.model)
        if self._texts is None:
            raise InputError("the model came without a tokenizer, so its outputs have no text.")
        if count > config.max_choices:
            raise ApiError(
                400,
                f"{count} choices are requested; this server gives at most {config.max_choices} "
                "to one request.",
                code="invalid_value",
                param="n" if request.num_choices > 1 else "prompt",
            )

    def _respond(
        self,
        request: BaseRequest,
        prompts: Sequence[Sequence[int]],
        response_format: type[ResponseFormat],
    ) -> SequencesResponse:
        service, texts = self._service, self._texts
        assert texts is not None
        first = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        sequences: list[Decoded] = []
        with at_param(response_format.prompt_param):
            for prompt in prompts:
                limits = service.limits
                room = max(1, min(limits.max_new_tokens, limits.context - len(prompt)))
                for _ in range(request.num_choices):
                    index = len(sequences)
                    params = request.to_sampling_params(
                        request.max_new_tokens or room, (first + index) % _SEEDS
                    )
                    options = request.domino
                    sequences.append(
                        service.sequence(
                            prompt,
                            params,
                            index=index,
                            speculate=options.speculate,
                            reuse=options.reuse,
                        )
                    )
        return SequencesResponse(
            service, request, sequences, response_format(service.config.model, request, texts)
        )


def check_model(name: str, served: str) -> None:
    """Refuse a model that is not served, as OpenAI does."""
    if name != served:
        raise ApiError(
            404,
            f"there is no model {name[:200]!r} here; this server has {served!r}.",
            code="model_not_found",
            param="model",
        )


def _check_template_kwargs(options: Mapping[str, Any], template: str, tokenizer: Any) -> None:
    """Refuse what the template does not use, and arguments of `apply_chat_template` itself.

    One of these is a template, which is a program.
    """
    if not options:
        return
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in options:
        known = name.isidentifier() and re.search(rf"\b{name}\b", template)
        if name in reserved or not known:
            raise ApiError(
                400,
                f"the model's chat template has no variable {name[:80]!r} that a request may set.",
                code="unknown_parameter",
                param=f"chat_template_kwargs.{name[:80]}",
            )


# Outputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the text with its log-probability and the likeliest at its position."""

    token: int
    start: int
    """Where in the text it begins."""
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What an output added to a choice."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)
    block: DominoBlock | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.scored or self.block)


class Choice:
    """Detokenises a sequence's outputs.

    Log-probabilities are given for the tokens that the text is made of, together with their text:
    neither tokens of a stop string nor the end-of-sequence token are part of it.
    """

    def __init__(self, sequence: Decoded, request: BaseRequest, texts: TokenTexts) -> None:
        self.sequence = sequence
        self.index = sequence.index
        self.text = ""
        self.scored: list[ScoredToken] = []
        self.finish_reason: FinishReason | None = None
        self.tokens = self.accepted = self.rejected = 0
        self._texts = texts
        self._logprobs = request.num_logprobs
        self._blocks = request.domino.blocks
        self._stream = TextStream(texts.tokenizer, sequence.params.stop)
        self._pieces = TextStream(texts.tokenizer)  # each token's own, stop strings and all
        self._pieces_length = 0
        self._pending: list[ScoredToken] = []

    def add(self, output: SequenceOutput) -> Delta:
        """What a step added to it."""
        tokens, block = output.tokens, None
        own = tokens[:-1] if output.finish_reason == "eos" else tokens
        if self._blocks or self._logprobs is not None:
            block = self._add_tokens(output, len(own))
        self.tokens += len(tokens)
        self.accepted += output.accepted
        text = self._stream.push(*own)
        if output.finish_reason is not None:
            text += self._stream.finish()  # held back in case it became a stop string
            self.finish_reason = "length" if output.finish_reason == "length" else "stop"
            self.rejected = max(0, sum(output.sequence.stats.offered) - self.accepted)
        self.text += text
        ready = 0
        while ready < len(self._pending) and self._pending[ready].start < len(self.text):
            ready += 1
        scored, self._pending = self._pending[:ready], self._pending[ready:]
        self.scored += scored
        return Delta(text, scored, block)

    def _add_tokens(self, output: SequenceOutput, in_text: int) -> DominoBlock | None:
        """Tokens one by one: their scores wait for their text, and make up the block."""
        tokens = []
        for place, token in enumerate(output.tokens):
            score = output.scores[place] if output.scores is not None else None
            text = self._add_token(token, score if place < in_text else None, place < in_text)
            if self._blocks:
                tokens.append(
                    BlockToken(
                        id=token,
                        text=text,
                        accepted=place < output.accepted,
                        position=self.tokens + place,
                        probability=None if score is None else math.exp(score.logprob),
                    )
                )
        if not self._blocks:
            return None
        return DominoBlock(
            choice=self.index, cycle=output.cycle, accepted=output.accepted, tokens=tokens
        )

    def _add_token(self, token: int, score: TokenScore | None, in_text: bool) -> str:
        if not in_text:
            return self._texts.text_of(token)
        start = self._pieces_length
        piece = self._pieces.push(token)
        if self._texts.is_special(token):
            return self._texts.text_of(token)
        self._pieces_length += len(piece)
        if self._logprobs is not None and score is not None:
            top = score.top[: self._logprobs]
            self._pending.append(ScoredToken(token, start, score.logprob, top))
        return piece


def _usage(choices: Sequence[Choice], n: int) -> Usage:
    """Tokens of a request; a prompt counts once, however many choices it has."""
    prompt = sum(len(choice.sequence.prompt) for choice in choices[::n])
    new = sum(choice.tokens for choice in choices)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=new,
        total_tokens=prompt + new,
        prompt_tokens_details=protocol.PromptTokensDetails(
            cached_tokens=sum(choice.sequence.cached for choice in choices[::n])
        ),
        completion_tokens_details=protocol.CompletionTokensDetails(
            accepted_prediction_tokens=sum(choice.accepted for choice in choices),
            rejected_prediction_tokens=sum(choice.rejected for choice in choices),
        ),
    )


# Responses ----------------------------------------------------------------------------------------


class ResponseFormat(ABC):
    """Builds the response models of one endpoint."""

    prefix: ClassVar[str]
    prompt_param: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, request: BaseRequest, texts: TokenTexts) -> None:
        self.texts = texts
        self._has_logprobs = request.num_logprobs is not None
        self._common: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._chunk = {**self._common, "object": self.chunk_object}
        if request.include_usage:
            self._chunk["usage"] = None
        # Encoded once: a stream has a chunk for every block, and all but its choice is the same.
        self._chunk_start = b"data: " + to_json(self._chunk)[:-1] + b',"choices":['

    def first_event(self, _choice: Choice) -> bytes:
        """What a choice's stream begins with."""
        return b""

    def delta_event(self, choice: Choice, delta: Delta) -> bytes:
        """What an output added to a choice."""
        fields = self._chunk_fields(delta.text)
        return self._event(choice, fields, self._logprobs(delta.scored), None, delta.block)

    def last_event(self, choice: Choice) -> bytes:
        """Why a choice ended."""
        return self._event(choice, self._chunk_fields(None), None, choice.finish_reason)

    def usage_event(self, usage: Usage) -> bytes:
        """The end of a stream that includes its usage."""
        return _sse(to_json({**self._chunk, "choices": [], "usage": usage}))

    def _event(
        self,
        choice: Choice,
        fields: dict[str, Any],
        logprobs: BaseModel | None = None,
        finish_reason: FinishReason | None = None,
        block: DominoBlock | None = None,
    ) -> bytes:
        """A chunk as its model in `protocol` describes it."""
        told = {
            "index": choice.index,
            **fields,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        domino = b"" if block is None else b',"domino":' + to_json(block)
        return b"".join((self._chunk_start, to_json(told), b"]", domino, b"}\n\n"))

    @abstractmethod
    def response(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        """All choices, complete."""

    @abstractmethod
    def _chunk_fields(self, text: str | None) -> dict[str, Any]:
        """Text as a choice of a chunk has it; None ends the choice."""

    @abstractmethod
    def _logprobs(self, scored: Sequence[ScoredToken]) -> Any: ...


class ChatFormat(ResponseFormat):
    """chat.completion and its chunks."""

    prefix = "chatcmpl"
    prompt_param = "messages"
    chunk_object = "chat.completion.chunk"

    def first_event(self, choice: Choice) -> bytes:
        """The role."""
        return self._event(choice, {"delta": {"role": "assistant", "content": ""}})

    def response(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        """A chat.completion."""
        return protocol.ChatCompletionResponse(
            **self._common,
            object="chat.completion",
            choices=[
                protocol.ChatChoice(
                    index=choice.index,
                    message=protocol.AssistantMessage(
                        role="assistant", content=choice.text, refusal=None
                    ),
                    logprobs=self._logprobs(choice.scored),
                    finish_reason=choice.finish_reason or "stop",
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _chunk_fields(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> protocol.ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return protocol.ChatLogprobs(
            content=[
                protocol.TokenLogprob(
                    **self._token(each.token, each.logprob),
                    top_logprobs=[protocol.TopLogprob(**self._token(*top)) for top in each.top],
                )
                for each in scored
            ],
            refusal=None,
        )

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.text_of(token),
            "logprob": max(logprob, _NO_LOGPROB),
            "bytes": list(self.texts.bytes_of(token)),
        }


class CompletionFormat(ResponseFormat):
    """text_completion, whole and in chunks."""

    prefix = "cmpl"
    prompt_param = "prompt"
    chunk_object = "text_completion"

    def response(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        """A text_completion."""
        return protocol.CompletionResponse(
            **self._common,
            object="text_completion",
            choices=[
                protocol.CompletionChoice(
                    index=choice.index,
                    text=choice.text,
                    logprobs=self._logprobs(choice.scored),
                    finish_reason=choice.finish_reason or "stop",
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _chunk_fields(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> protocol.CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        return protocol.CompletionLogprobs(
            tokens=[self.texts.text_of(each.token) for each in scored],
            token_logprobs=[max(each.logprob, _NO_LOGPROB) for each in scored],
            top_logprobs=[self._top(each) for each in scored],
            text_offset=[each.start for each in scored],
        )

    def _top(self, each: ScoredToken) -> dict[str, float]:
        """By text, the likeliest first; the token itself is always among them."""
        found: dict[str, float] = {}
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(self.texts.text_of(token), max(logprob, _NO_LOGPROB))
        return found


class SequencesResponse:
    """ASGI: decodes sequences while their client listens; sends the response, whole or streamed.

    Nothing is sent before the first event: until then an error still has its own status.
    """

    def __init__(
        self,
        service: Service,
        request: BaseRequest,
        sequences: Sequence[Decoded],
        response_format: ResponseFormat,
    ) -> None:
        self._service = service
        self._request = request
        self._sequences = sequences
        self._format = response_format
        self._choices = [Choice(each, request, response_format.texts) for each in sequences]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        try:
            with at_param(self._format.prompt_param):
                stream = self._service.submit(self._sequences, client=client_of(scope))
            async with stream:
                if self._request.stream:
                    await self._send_stream(stream, request_id, send)
                    return
                async for outputs in stream:
                    for output in outputs:
                        self._add(output)
            model = self._format.response(self._choices, self._usage())
            body = model.model_dump_json(exclude_unset=True)
            response = Response(body, media_type="application/json")
        except Exception as error:
            response = to_api_error(error, request_id=request_id).response
        await response(scope, receive, send)

    async def _send_stream(self, stream: OutputStream, request_id: str, send: Send) -> None:
        """Raises only before anything was sent."""
        started = False
        async for outputs in stream:
            events: list[bytes] = []
            failure: Exception | None = None
            try:
                for output in outputs:
                    events += self._add(output)
            except Exception as error:
                if not (started or events):
                    raise
                failure = error
                events.append(_sse(to_api_error(error, request_id=request_id).to_json()))
            ended = failure is not None or all(c.finish_reason for c in self._choices)
            if ended:
                if failure is None and self._request.include_usage:
                    events.append(self._format.usage_event(self._usage()))
                events.append(_DONE)
            if events and not started:
                started = True
                await send(_START)
            if events:  # of all outputs in one message: each is a system call
                body = b"".join(events)
                await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if ended:
                return

    def _add(self, output: SequenceOutput) -> list[bytes]:
        """The events of an output; none where the response is not streamed."""
        if output.error is not None:
            raise output.error
        choice = self._choices[output.sequence.index]
        begins = not choice.tokens
        delta = choice.add(output)
        if not self._request.stream:
            return []
        events = [self._format.first_event(choice)] if begins else []
        if delta:
            events.append(self._format.delta_event(choice, delta))
        if choice.finish_reason is not None:
            events.append(self._format.last_event(choice))
        return [event for event in events if event]

    def _usage(self) -> Usage:
        return _usage(self._choices, self._request.num_choices)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do this unless the client disconnects, whatever it is waiting for at that moment."""
    working, gone = asyncio.current_task(), False
    assert working is not None

    async def listen() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        working.cancel()

    listening = asyncio.ensure_future(listen())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not working.uncancel():
            raise ClientDisconnectedError from None
        raise
    finally:
        listening.cancel()


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
