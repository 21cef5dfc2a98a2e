"""The Responses API: its requests are chats, its responses another shape of their completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import to_json

from domino_spec.serving.completions import Choice, CompletionHandler, Delta, SequencesResponse
from domino_spec.serving.errors import ApiError, from_validation
from domino_spec.serving.parsers import Piece
from domino_spec.serving.protocol import (
    MAX_TOOLS,
    UNSUPPORTED,
    UNSUPPORTED_PART,
    Arguments,
    BaseRequest,
    CallId,
    ChatCompletionRequest,
    CompletionTokensDetails,
    EmptyList,
    FunctionDefinition,
    JsonObjectFormat,
    JsonSchema,
    NullIsDefault,
    PromptTokensDetails,
    StrictModel,
    TemplateKwargs,
    TextFormat,
    ToolName,
    ToolType,
    check_tools,
    inconsistent,
    only,
)

_STATE = "nothing is stored here; send the whole conversation as input"
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **UNSUPPORTED,
    "previous_response_id": ((), _STATE),
    "conversation": ((), _STATE),
    "store": ((False,), "nothing is stored here; say false"),
    "background": ((False,), "responses are not made in the background; leave it out"),
    "prompt": ((), "there are no stored prompts; send it as instructions and input"),
    "include": (
        ([], ["reasoning.encrypted_content"]),
        "nothing more can be included; reasoning comes as text",
    ),
    "max_tool_calls": ((), "the server runs no tools; leave it out"),
    "reasoning": (
        ({}, {"effort": None}, {"effort": None, "summary": None}),
        "the amount of reasoning cannot be set; see chat_template_kwargs",
    ),
    "top_logprobs": ((0,), "log-probabilities are told by chat completions alone"),
    "truncation": (("disabled",), "nothing of the input is left out; shorten it"),
}
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""Parameters of a chat by their names here."""

Status = Literal["in_progress", "completed", "incomplete"]

# Requests -----------------------------------------------------------------------------------------


PartType = Literal["input_text", "output_text", "text", "reasoning_text"]


class InputPart(StrictModel, path="input.content."):
    """A part of a message: text, also as this server sent it."""

    type: Annotated[PartType, BeforeValidator(only(*get_args(PartType), reason=UNSUPPORTED_PART))]
    text: str
    annotations: EmptyList | None = None
    logprobs: EmptyList | None = None
    parsed: JsonValue = None
    """OpenAI's client keeps an object here, and sends it along."""


InputText = str | Annotated[list[InputPart], Field(fail_fast=True, min_length=1)]


class BaseItem(StrictModel, path="input."):
    """Fields that items have once a server sent them."""

    id: str | None = None
    status: Status | None = None


class MessageItem(BaseItem):
    """What the model is told, or wrote."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputText


class FunctionCallItem(BaseItem):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Arguments
    parsed_arguments: JsonValue = None


class FunctionCallOutputItem(BaseItem):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: InputText


class ReasoningItem(BaseItem):
    """What the model thought; it belongs to what it wrote next."""

    type: Literal["reasoning"]
    summary: EmptyList = Field(default_factory=list)
    content: Annotated[list[InputPart], Field(fail_fast=True)] | None = None
    encrypted_content: None = None


def _item_type(item: Any) -> Any:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="unsupported",
        custom_error_message="items of this type are not supported; expected message, "
        "function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(FunctionDefinition, path="tools."):
    """A function that the model may call."""

    type: ToolType


class FunctionChoice(StrictModel, path="tool_choice."):
    """The function that is to be called."""

    type: Literal["function"]
    name: ToolName


class ResponseJsonSchema(JsonSchema, path="text.format."):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


class TextOptions(StrictModel, path="text."):
    """What the text must be."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | ResponseJsonSchema, Field(discriminator="type")]
        | None
    ) = None
    verbosity: None = None

    def to_chat(self) -> dict[str, Any] | None:
        """As chats have it."""
        if not isinstance(self.format, ResponseJsonSchema):
            return None if self.format is None else self.format.model_dump()
        schema = self.format.model_dump(by_alias=True, exclude_unset=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": schema}


class ResponsesRequest(BaseRequest):
    """The body of /v1/responses."""

    unsupported = _UNSUPPORTED

    input: str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextOptions, NullIsDefault] = TextOptions()
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    chat_template_kwargs: TemplateKwargs = None

    @model_validator(mode="after")
    def _check_consistent(self) -> ResponsesRequest:
        choice = self.tool_choice
        named = choice.name if isinstance(choice, FunctionChoice) else None
        check_tools([tool.name for tool in self.tools or []], choice, named, at="")
        if self.domino.blocks:
            words = "is told by chat completions alone; leave it out"
            raise inconsistent("domino.blocks", words, kind="unsupported")
        known: set[str] = set()
        for place, item in enumerate(self.input if isinstance(self.input, list) else []):
            if isinstance(item, FunctionCallItem):
                known.add(item.call_id)
            elif isinstance(item, FunctionCallOutputItem) and item.call_id not in known:
                raise inconsistent(
                    f"input[{place}].call_id",
                    f"is {item.call_id!r}; expected that of a function_call before it",
                )
        return self

    def to_chat(self) -> ChatCompletionRequest:
        """The same as a chat."""
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        functions = [
            tool.model_dump(exclude_unset=True, exclude={"type"}) for tool in self.tools or []
        ]
        same = (
            "model", "parallel_tool_calls", "temperature", "top_p", "stream", "seed", "top_k",
            "min_p", "chat_template_kwargs", "domino",
        )  # fmt: skip
        return ChatCompletionRequest.model_validate({
            **{name: getattr(self, name) for name in same},
            "messages": self._messages(),
            "tools": [{"type": "function", "function": each} for each in functions],
            "tool_choice": choice,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.to_chat(),
        })  # fmt: skip

    def _messages(self) -> list[dict[str, Any]]:
        """Reasoning, text and calls of one turn of the assistant are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        turn: dict[str, Any] | None = None
        for item in self.input:
            if isinstance(item, FunctionCallOutputItem):
                told = {"tool_call_id": item.call_id, "content": _text(item.output)}
                messages.append({"role": "tool", **told})
                turn = None
                continue
            if isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _text(item.content)})
                turn = None
                continue
            if turn is None or not _continues_turn(turn, item):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            if isinstance(item, MessageItem):
                turn["content"] = _text(item.content)
            elif isinstance(item, ReasoningItem):
                if text := _text(item.content or []):
                    turn["reasoning_content"] = text
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
        # Reasoning that was cut off before it came to anything has no text.
        return [each for each in messages if len(each) > 2 or each["content"] is not None]


def _text(parts: str | list[InputPart]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _continues_turn(
    turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem
) -> bool:
    """Whether the item belongs to this turn: reasoning comes first, calls last."""
    if isinstance(item, FunctionCallItem):
        return True
    return turn["content"] is None and "tool_calls" not in turn and isinstance(item, MessageItem)


# Responses ----------------------------------------------------------------------------------------


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(BaseModel):
    """What the model wrote."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """What it thought before."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputFunctionCall(BaseModel):
    """A call that the client is to make."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[
    OutputMessage | OutputReasoning | OutputFunctionCall, Field(discriminator="type")
]


class ResponseUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed in the midst of its stream."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response ends early."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    text: TextOptions
    temperature: float
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """An event of a streamed response; fields that its type has not are left out."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    logprobs: list[Any] = []


Event = dict[str, Any]
_PARTS: dict[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
_ITEMS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputItems:
    """The items of a response as they come, and the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}
        """The last of them, until it is closed."""

    def add(self, piece: Piece, call_id: str) -> Iterator[Event]:
        """Take in what comes next; `call_id` is that of a call which begins."""
        if piece.kind == "call":
            call = {"call_id": call_id, "name": piece.text, "arguments": ""}
            yield from self._begin("function_call", call)
        elif piece.kind == "arguments":
            self._open["arguments"] += piece.text
            yield self._event("function_call_arguments.delta", delta=piece.text)
        else:
            kind = "message" if piece.kind == "content" else "reasoning"
            if self._open.get("type") != kind:
                yield from self._begin_text(kind)
            self._open["content"][0]["text"] += piece.text
            yield self._text_event("delta", delta=piece.text)

    def close(self, status: Status) -> Iterator[Event]:
        """End the item that is open."""
        item = self._open
        if not item:
            return
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("function_call_arguments.done", **told)
        else:
            (part,) = item["content"]
            yield self._text_event("done", text=part["text"])
            yield self._event("content_part.done", content_index=0, part={**part})
        yield self._item_event("done")
        self._open = {}

    def finish(self, status: Status) -> Iterator[Event]:
        """The last one; a response has one at least."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self.close(status)

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self.close("completed")
        id_ = f"{_IDS[kind]}_{uuid.uuid4().hex}"
        self._open = {"type": kind, "id": id_, "status": "in_progress", **fields}
        self.items.append(self._open)
        yield self._item_event("added")

    def _begin_text(self, kind: str) -> Iterator[Event]:
        yield from self._begin(kind, {**_ITEMS[kind], "content": []})
        self._open["content"].append({**_PARTS[kind]})
        yield self._event("content_part.added", content_index=0, part={**_PARTS[kind]})

    def _text_event(self, what: str, **fields: Any) -> Event:
        part = _PARTS[self._open["type"]]
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._event(f"{part['type']}.{what}", content_index=0, **fields, **more)

    def _item_event(self, what: str) -> Event:
        item = {**self._open}
        if "content" in item:
            item["content"] = [{**part} for part in item["content"]]
        index = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": item}

    def _event(self, kind: str, **fields: Any) -> Event:
        at = {"item_id": self._open["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **at, **fields}


class ResponsesResponse(SequencesResponse):
    """A response object, or the events of one."""

    prefix, prompt_param = "resp", "input"

    def __init__(self, asked: ResponsesRequest, *given: Any) -> None:
        super().__init__(*given)
        self._asked = asked
        self._items = OutputItems()
        self._events_sent = 0
        self._calls = 0

    def _events(self, choice: Choice, delta: Delta, *, begins: bool) -> list[bytes]:
        events: list[Event] = []
        if begins:
            started = self._response("in_progress")
            names = ("response.created", "response.in_progress")
            events = [{"type": name, "response": started} for name in names]
        for piece in delta[0]:
            call_id = ""
            if piece.kind == "call":
                call_id = choice.message.calls[self._calls].id
                self._calls += 1
            events += self._items.add(piece, call_id)
        if choice.finish_reason is not None:
            events += self._items.finish(self._status())
        return [self._encode(event) for event in events] if self._request.stream else []

    def _end_events(self) -> list[bytes]:
        status = self._status()
        return [self._encode({"type": f"response.{status}", "response": self._whole()})]

    def _error_events(self, error: ApiError) -> list[bytes]:
        code = "rate_limit_exceeded" if error.status_code == 429 else "server_error"
        failure = {"code": code, "message": error.detail}
        failed = self._response("failed", error=failure)
        return [self._encode({"type": "response.failed", "response": failed})]

    def _encode(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._events_sent}
        self._events_sent += 1
        name = str(event["type"]).encode()
        return b"event: " + name + b"\ndata: " + to_json(numbered) + b"\n\n"

    def _status(self) -> Status:
        return "incomplete" if self._choices[0].finish_reason == "length" else "completed"

    def _whole(self) -> dict[str, Any]:
        status, usage = self._status(), self._usage()
        details = None if status == "completed" else {"reason": "max_output_tokens"}
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return self._response(status, incomplete_details=details, usage=told)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        asked = self._asked
        tools = [tool.model_dump(exclude_unset=True) for tool in asked.tools or []]
        choice = asked.tool_choice
        return {
            "id": self._common["id"].replace("-", "_"),
            "object": "response",
            "created_at": self._common["created"],
            "status": status,
            "model": self._common["model"],
            "output": [*self._items.items],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": asked.text.format or TextFormat(type="text")},
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice
            or "auto",
            "tools": tools,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            **fields,
        }  # fmt: skip


class ResponsesHandler:
    """Handles requests of the Responses API by way of chat completions."""

    def __init__(self, chats: CompletionHandler) -> None:
        self._chats = chats

    async def responses(self, request: ResponsesRequest) -> SequencesResponse:
        """Answer a conversation; with `stream`, in events as blocks are committed."""
        try:
            chat = request.to_chat()
        except ValidationError as error:
            raise from_validation(error, {}) from error
        try:
            return await self._chats.chat(chat, partial(ResponsesResponse, request))
        except ApiError as error:
            error.param = _PARAMS.get(error.param or "", error.param)
            raise
