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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from domino_spec import __version__
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding import SequenceOutput, StopRule, TextStream, TokenScore, merged
from domino_spec.errors import InputError
from domino_spec.grammars import CompiledGrammar
from domino_spec.serving.chat import ChatFormat, after_one_call
from domino_spec.serving.errors import ApiError, ClientDisconnectedError, at_param, to_api_error
from domino_spec.serving.middleware import client_of
from domino_spec.serving.parsers import MessageFormat, MessageParser, Piece, merge
from domino_spec.serving.protocol import (
    BaseCompletionRequest,
    ChatCompletionRequest,
    ChatFinishReason,
    ChatOptions,
    CompletionRequest,
    StreamOptions,
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
        self._format = None if self._texts is None else ChatFormat(self._texts, service.config)

    async def chat_completions(self, request: ChatCompletionRequest) -> SequencesResponse:
        """Complete a chat; with `stream`, in server-sent events as blocks are committed."""
        return await self.chat(request, ChatResponse)

    async def chat(
        self, request: ChatCompletionRequest, response: Callable[..., SequencesResponse]
    ) -> SequencesResponse:
        """Complete a chat, answered in the shape of `response`."""
        self._check(request, 1)
        assert self._format is not None
        prompt, inputs = await self.encode(request)
        form = self._format.message_format(request, prompt)
        grammar = None
        if (wanted := self._format.grammar(request, form)) is not None:
            param, text = wanted
            with at_param(param):  # before anything is queued
                grammar = await self._service.compile_grammar(text)
        return self._respond(request, [prompt], response, form, grammar, inputs)

    async def encode(self, request: ChatOptions) -> tuple[list[int], dict[str, Any]]:
        """A chat's token ids, through the target's own template, and its images for the prefill."""
        service, known = self._service, self._format
        if known is None:
            raise InputError("the model came without a tokenizer, which has the chat template.")
        options = request.chat_template_kwargs or {}
        _check_template_kwargs(options, known.template, service.tokenizer)
        options = {**options, **request.template_options, **known.template_options(request)}
        messages = request.to_template()
        if "developer" not in known.template:  # OpenAI's newer name; most templates know the old
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        with at_param("messages"):
            if any(not isinstance(message["content"], str) for message in messages):
                return await service.encode_images(messages, options)
            tokens = await service.encode_chat(
                messages, options, add_special_tokens=bool(request.add_special_tokens)
            )
        return tokens, {}

    async def completions(self, request: CompletionRequest) -> SequencesResponse:
        """Complete a text, or several, or token ids."""
        self._check(request, len(request.prompts))
        grammar = None
        for param, make in request.grammars.items():  # one at most
            with at_param(param):
                grammar = await self._service.compile_grammar(make())
        special = request.add_special_tokens is not False
        with at_param("prompt"):
            prompts = [
                await self._service.encode_text(prompt, add_special_tokens=special)
                if isinstance(prompt, str)
                else prompt
                for prompt in request.prompts
            ]
        return self._respond(request, prompts, CompletionResponse, MessageFormat(), grammar)

    def _check(self, request: BaseCompletionRequest, prompts: int) -> None:
        config, count = self._service.config, prompts * request.num_choices
        check_model(request.model, config.model)
        if self._texts is None:
            raise InputError("the model came without a tokenizer, so its outputs have no text.")
        if count > config.max_choices:
            with at_param("n" if request.num_choices > 1 else "prompt"):
                raise InputError(
                    f"{count} choices are requested; this server gives at most "
                    f"{config.max_choices} to one request."
                )

    def _respond(
        self,
        request: BaseCompletionRequest,
        prompts: Sequence[Sequence[int]],
        response: Callable[..., SequencesResponse],
        form: MessageFormat,
        grammar: CompiledGrammar | None = None,
        multimodal_inputs: Mapping[str, Any] | None = None,
    ) -> SequencesResponse:
        service, texts, options = self._service, self._texts, request.domino
        assert texts is not None
        first = secrets.randbelow(_SEEDS) if request.seed is None else request.seed
        sequences: list[Decoded] = []
        with at_param("prompt" if isinstance(request, CompletionRequest) else "messages"):
            for prompt in prompts:
                limits = service.limits
                room = min(limits.max_new_tokens, limits.context - len(prompt))
                new = room if request.max_new_tokens is None else request.max_new_tokens
                for choice in range(request.num_choices):
                    index = len(sequences)
                    # Where no token is wanted one is decoded, and not told.
                    params = request.to_sampling_params(max(1, new), (first + index) % _SEEDS)
                    if choice and request.echo_logprobs is None:  # a prompt is scored once
                        params = replace(params, prompt_logprobs=None)
                    rules: list[StopRule] = []
                    if form.tools is not None and not form.parallel:
                        rules = [after_one_call(form, texts.tokenizer, params)]
                    if grammar is not None:
                        accept = options.accept or "coupled"
                        params = replace(params, grammar=grammar.grammar, accept=accept)
                    sequences.append(
                        service.sequence(
                            prompt,
                            params,
                            index=index,
                            kept=form.kept,
                            rules=rules,
                            matcher=None if grammar is None else grammar.matcher(),
                            speculate=options.speculate,
                            reuse=options.reuse,
                            multimodal_inputs=multimodal_inputs,
                        )
                    )
        return response(service, request, sequences, texts, form)


def check_model(name: str | None, served: str) -> None:
    """Refuse a model that is not served, as OpenAI does; None is the one that is."""
    if name is not None and name != served:
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


class ScoredToken(NamedTuple):
    """A token of the text with its log-probability and the likeliest at its position."""

    token: int
    start: int
    """Where in the text it begins."""
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    top: tuple[tuple[int, float], ...]


Delta = tuple[list[Piece], list[ScoredToken], dict[str, Any] | None]
"""What an output added to a choice: its message's, log-probabilities and its block."""


class Choice:
    """Detokenises a sequence's outputs, and takes a message's apart.

    Log-probabilities are given for the tokens that the text is made of, together with their text:
    neither tokens of a stop string nor the end-of-sequence token are part of it. Reasoning, calls
    and their markers are. Where the text repeats the prompt every token has one, so that a client
    can count them.
    """

    def __init__(
        self,
        sequence: Decoded,
        request: BaseCompletionRequest,
        texts: TokenTexts,
        form: MessageFormat,
        echo: str | None = None,
    ) -> None:
        """`echo` is the prompt's text, where the choice is to begin with it."""
        self.sequence = sequence
        self.index = sequence.index
        self.echo = echo
        self.text = echo or ""
        """All that was written."""
        self.message = MessageParser(form)
        self.scored: list[ScoredToken] = []
        self.finish_reason: ChatFinishReason | None = None
        self.tokens = self.accepted = self.rejected = self.reasoning_tokens = 0
        self._kept, self._reasoning_end = form.kept, form.reasoning_end
        self._thought = 0
        self._texts = texts
        self._logprobs = request.num_logprobs
        self._blocks = request.domino.blocks
        self._stream = TextStream.of(texts.tokenizer, sequence.params, kept=form.kept)
        self._skip = sequence.params.skip_special_tokens
        # Each token's own text, stop strings and all.
        self._pieces = TextStream(texts.tokenizer, skip_special_tokens=self._skip, kept=form.kept)
        self._pieces_length = len(self.text)
        self._silent = request.max_new_tokens == 0
        self._pending: list[ScoredToken] = []

    def add(self, output: SequenceOutput) -> Delta:
        """What a step added to it."""
        if self._silent:
            self.finish_reason = "length"
            return [], [], None
        tokens, block = output.tokens, None
        own = self.sequence.in_text(tokens)
        if self._blocks or self._logprobs is not None:
            block = self._add_tokens(output, len(own))
        self.tokens += len(tokens)
        self.accepted += output.accepted
        pieces = self._read(own)
        if output.finish_reason is not None:
            pieces += self._finish(length=output.finish_reason == "length")
            self.rejected = max(0, sum(output.sequence.stats.offered) - self.accepted)
        pieces = merge(pieces)
        ready = len(self._pending) if self.echo is not None and self.finish_reason else 0
        while ready < len(self._pending) and self._pending[ready].start < len(self.text):
            ready += 1
        scored, self._pending = self._pending[:ready], self._pending[ready:]
        self.scored += scored
        return pieces, scored, block

    def _read(self, tokens: Sequence[int]) -> list[Piece]:
        reasoning, pieces = self.message.reasoning_parser, []
        # Tokens after reasoning are not counted: up to its last one, or one by one.
        while reasoning.active and tokens:
            end = 1
            if self._reasoning_end is not None:
                end = len(tokens)
                if self._reasoning_end in tokens:
                    end = tokens.index(self._reasoning_end) + 1
            pieces += self._take(self._stream.push(*tokens[:end]))
            self._thought += end
            self.reasoning_tokens = self._thought if reasoning.begun else 0
            tokens = tokens[end:]
        return pieces + self._take(self._stream.push(*tokens))

    def _take(self, text: str) -> list[Piece]:
        self.text += text
        return self.message.push(text)

    def _finish(self, *, length: bool) -> list[Piece]:
        message = self.message
        pieces = self._take(self._stream.finish())  # held back in case it became a stop string
        pieces += message.finish()
        called = message.calls and message.complete
        self.finish_reason = "length" if length else "tool_calls" if called else "stop"
        return pieces

    def scored_prompt(self) -> list[ScoredToken]:
        """The prompt's tokens, where the text begins with them and they are wanted."""
        if self.echo is None or self._logprobs is None:
            return []
        pieces, start = TextStream(self._texts.tokenizer, skip_special_tokens=self._skip), 0
        scores = self.sequence.prompt_scores or [None] * len(self.sequence.prompt)
        found = []
        for token, score in zip(self.sequence.prompt, scores, strict=True):
            top = () if score is None else score.top[: self._logprobs]
            logprob = None if score is None else score.logprob
            found.append(ScoredToken(token, min(start, len(self.echo)), logprob, top))
            start += len(pieces.push(token))
        return found

    def _add_tokens(self, output: SequenceOutput, in_text: int) -> dict[str, Any] | None:
        """Tokens one by one: their scores wait for their text, and make up the block."""
        tokens = []
        tree = output.tree if self._blocks else None
        lost = {} if tree is None else dict(enumerate(tree.lost()))
        for place, token in enumerate(output.tokens):
            score = output.scores[place] if output.scores is not None else None
            text = self._add_token(token, score, place < in_text)
            if self._blocks:
                tokens.append({
                    "id": token,
                    "text": text,
                    "accepted": place < output.accepted,
                    "position": self.tokens + place,
                    "probability": None if score is None else math.exp(score.logprob),
                    "lost": [self._texts.text_of(*branch) for branch in lost.get(place, ())],
                })  # fmt: skip
        if not self._blocks:
            return None
        cycle, accepted = output.cycle, output.accepted
        return {"choice": self.index, "cycle": cycle, "accepted": accepted, "tokens": tokens}

    def _add_token(self, token: int, score: TokenScore | None, in_text: bool) -> str:
        start, piece = self._pieces_length, ""
        if in_text:
            piece = self._pieces.push(token)
        named = token in self._kept or not self._skip
        if in_text and (named or not self._texts.is_special(token)):
            self._pieces_length += len(piece)
        else:
            piece = self._texts.text_of(token)
            if self.echo is None:
                return piece
        if self._logprobs is not None and score is not None:
            top = score.top[: self._logprobs]
            self._pending.append(ScoredToken(token, start, score.logprob, top))
        return piece


# Responses ----------------------------------------------------------------------------------------


class SequencesResponse(ABC):
    """ASGI: decodes sequences while their client listens; sends the response, whole or streamed.

    Nothing is sent before the first event: until then an error still has its own status. What is
    sent has the shape of the models in `protocol`.
    """

    prefix: ClassVar[str]
    prompt_param: ClassVar[str]

    def __init__(
        self,
        service: Service,
        request: BaseCompletionRequest,
        sequences: Sequence[Decoded],
        texts: TokenTexts,
        form: MessageFormat,
    ) -> None:
        self.texts = texts
        self._service, self._request, self._sequences = service, request, sequences
        self._choices = [Choice(each, request, texts, form, self._echo(each)) for each in sequences]
        self._common: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.config.model,
            "system_fingerprint": FINGERPRINT,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        try:
            with at_param("n" if self._request.num_choices > 1 else self.prompt_param):
                stream = self._service.submit(self._sequences, client=client_of(scope))
            async with stream:
                if self._request.stream:
                    await self._send_stream(stream, request_id, send)
                    return
                async for outputs in stream:
                    for output in outputs:
                        self._add(output)
            if any(each.prompt_scores for each in self._sequences):
                body = await asyncio.to_thread(lambda: to_json(self._whole()))  # may be megabytes
            else:
                body = to_json(self._whole())
            response = Response(body, media_type="application/json")
        except Exception as error:
            response = to_api_error(error, request_id=request_id).response
        await response(scope, receive, send)

    async def _send_stream(self, stream: OutputStream, request_id: str, send: Send) -> None:
        """Raises only before anything was sent."""
        started = False
        async for outputs in stream:
            events: list[bytes] = []
            try:
                for output in outputs if self._request.domino.blocks else merged(outputs):
                    events += self._add(output)
                ended = all(choice.finish_reason for choice in self._choices)
                events += self._end_events() if ended else []
            except Exception as error:
                if not (started or events):
                    raise
                events += self._error_events(to_api_error(error, request_id=request_id))
                ended = True
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
        return self._events(choice, choice.add(output), begins=begins)

    def _echo(self, sequence: Decoded) -> str | None:  # noqa: ARG002
        """The text of a prompt that is to be repeated."""
        return None

    @abstractmethod
    def _events(self, choice: Choice, delta: Delta, *, begins: bool) -> list[bytes]:
        """What a stream tells of a delta; none where the response is not streamed."""

    @abstractmethod
    def _end_events(self) -> list[bytes]:
        """After the last choice."""

    @abstractmethod
    def _error_events(self, error: ApiError) -> list[bytes]:
        """In the midst of a stream."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """What is sent where nothing is streamed."""

    def _usage(self) -> dict[str, Any]:
        """Tokens of the request; a prompt counts once, however many choices it has."""
        prompts = [choice.sequence for choice in self._choices[:: self._request.num_choices]]
        prompt = sum(len(sequence.prompt) for sequence in prompts)
        new = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(each.cached for each in prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.accepted for choice in self._choices),
                "rejected_prediction_tokens": sum(choice.rejected for choice in self._choices),
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self._choices),
            },
        }


class ChoicesResponse(SequencesResponse):
    """Choices in OpenAI's older shapes, whole or in chunks."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    first_fields: ClassVar[dict[str, Any] | None] = None
    """Of the chunk that a choice's stream begins with, if any."""
    last_fields: ClassVar[dict[str, Any]]
    """Of the chunk that ends a choice."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._options = self._request.stream_options or StreamOptions()
        self._chunk = {**self._common, "object": self.chunk_kind}
        """What all chunks have in common."""
        if self._options.include_usage and not self._options.continuous_usage_stats:
            self._chunk["usage"] = None
        # Encoded once: a stream has a chunk for every block, alike but for its choice.
        self._chunk_start = b"data: " + to_json(self._chunk)[:-1] + b',"choices":['

    def _events(self, choice: Choice, delta: Delta, *, begins: bool) -> list[bytes]:
        if not self._request.stream:
            return []
        pieces, scored, block = delta
        events: list[bytes] = []
        if begins and self.first_fields is not None:
            events.append(self._event(choice, self.first_fields))
        if begins and choice.echo is not None:
            pieces = merge([Piece("content", choice.echo), *pieces])
            scored = choice.scored_prompt() + scored
        if not pieces and (scored or block):
            pieces = [Piece("content", "")]
        logprobs = self._logprobs(scored)
        for fields in self._chunk_fields(choice, pieces):
            events.append(self._event(choice, fields, logprobs, block=block))
            logprobs = block = None
        if choice.finish_reason is not None:
            reason = choice.finish_reason
            events.append(self._event(choice, self.last_fields, finish_reason=reason))
        return events

    def _end_events(self) -> list[bytes]:
        if not self._options.include_usage:
            return [_DONE]
        usage = {**self._chunk, "choices": [], "usage": self._usage()}
        return [_sse(to_json(usage)), _DONE]

    def _error_events(self, error: ApiError) -> list[bytes]:
        return [_sse(error.to_json()), _DONE]

    def _event(
        self,
        choice: Choice,
        fields: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        *,
        finish_reason: ChatFinishReason | None = None,
        block: dict[str, Any] | None = None,
    ) -> bytes:
        told = {
            "index": choice.index,
            **fields,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        told_usage = self._options.continuous_usage_stats
        usage = b',"usage":' + to_json(self._usage()) if told_usage else b""
        domino = b"" if block is None else b',"domino":' + to_json(block)
        return b"".join((self._chunk_start, to_json(told), b"]", usage, domino, b"}\n\n"))

    def _whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                **self._whole_fields(choice),
                "logprobs": self._logprobs([*choice.scored_prompt(), *choice.scored]),
                "finish_reason": choice.finish_reason or "stop",
            }
            for choice in self._choices
        ]
        return {**self._common, "object": self.kind, "choices": choices, "usage": self._usage()}

    def _prompt_logprobs(self, sequence: Decoded) -> dict[str, Any]:
        """The prompt's log-probabilities by token id, in vLLM's shape, where they are wanted."""
        most, found = self._request.prompt_logprobs, list[dict[str, Any] | None]()
        if most is None or sequence.prompt_scores is None:
            return {}
        for token, score in zip(sequence.prompt, sequence.prompt_scores, strict=True):
            if score is None:
                found.append(None)
                continue
            each: dict[str, Any] = {}
            ranked = [(place + 1, *top) for place, top in enumerate(score.top[:most])]
            for rank, one, value in [(score.rank, token, score.logprob), *ranked]:
                told = {"logprob": max(value, _NO_LOGPROB), "rank": rank}
                each.setdefault(str(one), {**told, "decoded_token": self.texts.text_of(one)})
            found.append(each)
        return {"prompt_logprobs": found}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return None if self._request.num_logprobs is None else self._scored(scored)

    @abstractmethod
    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        """Of a choice in a whole response."""

    @abstractmethod
    def _chunk_fields(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        """Of the chunks that tell these pieces, which the choice has taken in."""

    @abstractmethod
    def _scored(self, scored: Sequence[ScoredToken]) -> dict[str, Any]: ...


class ChatResponse(ChoicesResponse):
    """chat.completion and its chunks."""

    prefix, prompt_param = "chatcmpl", "messages"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    first_fields: ClassVar = {"delta": {"role": "assistant", "content": ""}}
    last_fields: ClassVar = {"delta": {}}

    def _whole(self) -> dict[str, Any]:
        return {**super()._whole(), **self._prompt_logprobs(self._sequences[0])}

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        message = choice.message
        more: dict[str, Any] = {}
        if message.reasoning:
            more["reasoning_content"] = message.reasoning
        if message.calls:
            more["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
        content = None if more and not message.content else message.content
        told = {"role": "assistant", "content": content, "refusal": None, **more}
        return {"message": told}

    def _chunk_fields(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        index = len(choice.message.calls) - sum(kind == "call" for kind, _ in pieces) - 1
        for kind, text in pieces:
            delta: dict[str, Any]
            if kind == "content":
                delta = {"content": text}
            elif kind == "reasoning":
                delta = {"reasoning_content": text}
            elif kind == "call":
                index += 1
                call = {"index": index, "id": choice.message.calls[index].id, "type": "function"}
                delta = {"tool_calls": [{**call, "function": {"name": text, "arguments": ""}}]}
            else:
                delta = {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            yield {"delta": delta}

    def _scored(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        content = [
            {
                **self._token(each.token, each.logprob or 0.0),
                "top_logprobs": [self._token(*top) for top in each.top],
            }
            for each in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.texts.text_of(token),
            "logprob": max(logprob, _NO_LOGPROB),
            "bytes": list(self.texts.bytes_of(token)),
        }


class CompletionResponse(ChoicesResponse):
    """text_completion, whole and in chunks."""

    prefix, prompt_param = "cmpl", "prompt"
    kind = chunk_kind = "text_completion"
    last_fields: ClassVar = {"text": ""}

    def _echo(self, sequence: Decoded) -> str | None:
        request = self._request
        assert isinstance(request, CompletionRequest)
        if not request.echo:
            return None
        prompt = request.prompts[sequence.index // request.num_choices]
        if isinstance(prompt, str):
            return prompt
        skip = sequence.params.skip_special_tokens
        return str(self.texts.tokenizer.decode(prompt, skip_special_tokens=skip))

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        first = choice.index - choice.index % self._request.num_choices
        return {"text": choice.text, **self._prompt_logprobs(self._sequences[first])}

    def _chunk_fields(self, choice: Choice, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        del choice
        yield from ({"text": text} for _, text in pieces)

    def _scored(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        return {
            "tokens": [self.texts.text_of(each.token) for each in scored],
            "token_logprobs": [
                None if each.logprob is None else max(each.logprob, _NO_LOGPROB) for each in scored
            ],
            "top_logprobs": [self._top(each) for each in scored],
            "text_offset": [each.start for each in scored],
        }

    def _top(self, each: ScoredToken) -> dict[str, float] | None:
        """By text, the likeliest first; the token itself is always among them."""
        found: dict[str, float] = {}
        if each.logprob is None:
            return None
        for token, logprob in (*each.top, (each.token, each.logprob)):
            found.setdefault(self.texts.text_of(token), max(logprob, _NO_LOGPROB))
        return found


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
