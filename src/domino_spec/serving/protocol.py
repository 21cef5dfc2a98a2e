"""Requests and responses of OpenAI's API, and this server's extensions of them."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticUseDefault

from domino_spec.decoding import SamplingParams
from domino_spec.decoding.params import MOST_BIAS, MOST_LOGPROBS
from domino_spec.grammars import Grammar
from domino_spec.grammars.grammar import MAX_NESTING, nested_deeper
from domino_spec.serving.parsers import TOOL_NAME, read_object
from domino_spec.settings import AcceptRule

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_TOKEN_IDS = 1024
"""Of `logit_bias` and `stop_token_ids`."""
MAX_TOOLS = 128
"""Tools of a request, and calls of a message."""
MAX_ID_LENGTH = 128
DEFAULT_COMPLETION_TOKENS = 16
"""As OpenAI's completions."""
_MAX_FIELDS = 100
"""More than any object has; each unknown one would become an error of its own."""
_MIN_TEMPERATURE = 1e-5
"""Logits divided by less leave float32's range; the likeliest token has all the weight anyway."""

_NO_TOOLS = "tools are for chats; use /v1/chat/completions or /v1/responses"
_OLD_TOOLS = "OpenAI's older form of tools is not supported; give tools and tool_choice"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((False, True), _NO_TOOLS),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "modalities": ((["text"],), "only ['text'] is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "predicted outputs are not supported: the drafter predicts by itself"),
    "reasoning_effort": ((), "the amount of reasoning cannot be set; see chat_template_kwargs"),
    "verbosity": ((), "not supported; ask for short or long answers in a message"),
    "web_search_options": ((), "the server searches nothing; leave it out"),
    "store": ((False,), "nothing is stored here; leave it out"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "echo": ((False,), "messages are not repeated; leave it out, or use /v1/completions"),
    "suffix": (("",), "text cannot be inserted before a suffix; leave it out"),
    "use_beam_search": ((False,), "there is no beam search; leave it out"),
    "length_penalty": ((1.0,), "it is for beam search, which there is not; leave it out"),
    "early_stopping": ((False,), "it is for beam search, which there is not; leave it out"),
    "bad_words": (([],), "words cannot be banned; ban their tokens with logit_bias"),
    "allowed_token_ids": (([],), "tokens cannot be allowed by a list; see logit_bias"),
    "logits_processors": (([],), "requests bring no code; see logit_bias"),
    "truncate_prompt_tokens": ((), "prompts are not cut; shorten it before it is sent"),
    "spaces_between_special_tokens": ((True,), "special tokens are decoded as the tokenizer does"),
    "return_tokens_as_token_ids": ((False,), "tokens are told by their text; leave it out"),
    "return_token_ids": ((False,), "token ids are not returned; see domino.blocks and /tokenize"),
    "chat_template": ((), "the model's own template is used; see chat_template_kwargs"),
    "documents": (([],), "put documents into the messages"),
    "mm_processor_kwargs": (({},), "only text is supported"),
    "include_reasoning": (
        (True,),
        "reasoning_content is always told; see chat_template_kwargs",
    ),
    "thinking_token_budget": ((), "the amount of reasoning cannot be set"),
    "priority": ((0,), "requests have no priority: the queue is fair; leave it out"),
    "cache_salt": ((), "prompts are reused across requests; set domino.reuse to false"),
    "kv_transfer_params": ((), "there is one server; leave it out"),
    "vllm_xargs": (({},), "there are no such options; see domino"),
    "repetition_detection": ((), "repetition is not detected; see repetition_penalty"),
}
"""Parameters of OpenAI's and vLLM's APIs that are refused by name, never ignored, and what to do
instead; null and the values that change nothing are taken."""

# Requests -----------------------------------------------------------------------------------------


def limit_fields(value: object) -> object:
    """Refuse an object of very many fields before each of them is validated."""
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise PydanticCustomError("too_many", "has more than {most} fields", {"most": _MAX_FIELDS})
    return value


class IgnoredFields:
    """Names of unknown fields that were dropped, as a response header tells them."""

    MOST, LONGEST = 16, 64

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        """More than a few are not named: each name is the client's own text."""
        if len(self._names) <= self.MOST:
            self._names[re.sub(r"[^A-Za-z0-9_.-]", "?", name[: self.LONGEST])] = None

    def __str__(self) -> str:
        names = list(self._names)
        return ", ".join(names[: self.MOST] + ["..."] * (len(names) > self.MOST))


class StrictModel(BaseModel):
    """Takes declared fields of the declared type and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    path: ClassVar[str | None] = None
    """Written before the name of an unknown field that is ignored; None refuses it instead."""

    def __init_subclass__(cls, path: str | None = None, **config: Unpack[ConfigDict]) -> None:
        super().__init_subclass__(**config)
        cls.path = cls.path if path is None else path

    @model_validator(mode="before")
    @classmethod
    def _ignore_unknown(cls, value: object, info: ValidationInfo) -> object:
        """Drop unknown fields, if the context is there to collect them."""
        ignored, value = info.context, limit_fields(value)
        if cls.path is None or not isinstance(ignored, IgnoredFields):
            return value
        if not isinstance(value, dict) or not (unknown := value.keys() - _names(cls)):
            return value
        for name in sorted(unknown):
            ignored.add(cls.path + name)
        return {name: each for name, each in value.items() if name not in unknown}


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Fields as requests call them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _use_default(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


NullIsDefault = BeforeValidator(_use_default)
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
AddSpecialTokens = Annotated[
    bool | None,
    Field(
        description="Whether the tokenizer adds its own to the prompt: true for a text, false for "
        "a chat, whose template writes them."
    ),
]
EmptyList = Annotated[list[Any], Field(max_length=0)]


class DominoOptions(StrictModel):
    """Extensions beyond OpenAI's API."""

    blocks: bool = Field(
        default=False,
        description="Every streamed chunk tells its block: which tokens were drafts, and how "
        "probable each was.",
    )
    speculate: bool = Field(
        default=True, description="Without drafts a seed gives the same text; it takes longer."
    )
    accept: AcceptRule | None = Field(
        default=None,
        description="How sampled drafts are accepted: coupled where the request has a seed, which "
        "then keeps its text with and without drafts, else block.",
    )
    reuse: bool = Field(
        default=True,
        description="Without, the whole prompt is computed, so that times can be compared.",
    )


class BaseStreamOptions(StrictModel, path="stream_options."):
    """What a stream carries besides its text or events."""

    include_obfuscation: Literal[False] | None = None


class StreamOptions(BaseStreamOptions):
    """Of completions."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="Every chunk tells the usage so far."
    )


class TextFormat(StrictModel, path="response_format."):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel, path="response_format."):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel, path="response_format.json_schema."):
    """A schema and its name."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = Field(
        default=None,
        description="false ignores keywords that cannot be enforced; otherwise they are refused.",
    )


class JsonSchemaFormat(StrictModel, path="response_format."):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuredOutputs(StrictModel, path="structured_outputs."):
    """vLLM's way to ask for structured outputs: one of these."""

    json_: dict[str, JsonValue] | str | None = Field(
        default=None, alias="json", description="A JSON schema."
    )
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="In Lark's notation or GBNF.")
    json_object: bool | None = None


_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "json_": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.grammar,
    "json_object": lambda _: Grammar.json_object(),
}
"""By the fields of `StructuredOutputs`."""


class ApiRequest(StrictModel, path=""):
    """The body of any endpoint."""

    unsupported: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = UNSUPPORTED

    # Pydantic runs the last of these first: what is refused by name is not unknown.
    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        given = cls.unsupported.keys() & (value.keys() - cls.model_fields.keys())
        for name in sorted(given):
            harmless, reason = cls.unsupported[name]
            if value[name] is not None and value[name] not in harmless:
                raise inconsistent(name, reason, kind="unsupported")
        return {name: each for name, each in value.items() if name not in given}


def limit_token_ids(value: object) -> object:
    """Refuse very many token ids before each of them is validated."""
    if isinstance(value, (dict, list)) and len(value) > MAX_TOKEN_IDS:
        words = "has more than {most} token ids"
        raise PydanticCustomError("too_many", words, {"most": MAX_TOKEN_IDS})
    return value


class BaseRequest(ApiRequest):
    """Parameters of every endpoint that generates text."""

    model: str
    seed: int | None = Field(
        default=None,
        ge=-(2**63),
        lt=2**63,
        description="Choice i of a request draws from seed + i; without one, from a fresh seed.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="1; 0, and what is as good as 0, is greedy."
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31, description="0 or -1 is off.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    stream: bool | None = None
    stream_options: BaseStreamOptions | None = None
    user: str | None = None
    metadata: Annotated[
        dict[str, str] | None, Field(max_length=16), BeforeValidator(limit_fields)
    ] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    domino: Annotated[DominoOptions, NullIsDefault] = DominoOptions()

    @model_validator(mode="after")
    def _check_stream_options(self) -> BaseRequest:
        if not self.stream and self.stream_options is not None:
            raise inconsistent("stream_options", "is for streams only; set stream, or drop it")
        return self


class BaseCompletionRequest(BaseRequest):
    """Parameters of both completions endpoints."""

    n: int | None = Field(default=None, ge=1, lt=2**31, description="Choices; 1.")
    stop: (
        StopString
        | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
        | None
    ) = Field(default=None, description="Text that ends a choice and is not part of it.")
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: Annotated[
        dict[
            Annotated[str, Field(pattern="^[0-9]{1,10}$")],
            Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)],
        ]
        | None,
        Field(max_length=MAX_TOKEN_IDS),
        BeforeValidator(limit_token_ids),
    ] = Field(default=None, description="Added to the logits of tokens, by their ids.")
    min_tokens: int | None = Field(
        default=None, ge=0, lt=2**31, description="Neither end tokens nor stop end a choice before."
    )
    stop_token_ids: Annotated[
        list[TokenId] | None,
        Field(fail_fast=True, max_length=MAX_TOKEN_IDS),
        BeforeValidator(limit_token_ids),
    ] = Field(default=None, description="Further tokens that end a choice.")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(default=None, description="In the text; true.")
    add_special_tokens: AddSpecialTokens = None
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MOST_LOGPROBS, description="Of the prompt's tokens; not in streams."
    )
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = Field(default=None, description="What the text must be.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, JsonValue] | str | None = Field(
        default=None, description="An older name of structured_outputs.json."
    )
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """None leaves it to the server."""
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives for each token; None without log-probabilities."""

    @property
    def echo_logprobs(self) -> int | None:
        """Alternatives for each token of a prompt that is repeated in the text."""
        return None

    @property
    def grammars(self) -> dict[str, Callable[[], Grammar]]:
        """Makers of what the text must match, by the parameters that say so: one at most."""
        found: dict[str, Callable[[], Grammar]] = {}
        if isinstance(self.response_format, JsonObjectFormat):
            found["response_format"] = Grammar.json_object
        elif isinstance(self.response_format, JsonSchemaFormat):
            given = self.response_format.json_schema
            lenient = given.strict is False
            found["response_format"] = partial(Grammar.json_schema, given.schema_, lenient=lenient)
        for field, make in _GRAMMARS.items():
            name = field.rstrip("_")
            structured = getattr(self.structured_outputs, field, None)
            guided = getattr(self, f"guided_{name}", None)
            for param, value in (
                (f"structured_outputs.{name}", structured),
                (f"guided_{name}", guided),
            ):
                if value is not None and value is not False:
                    found[param] = partial(make, value)
        return found

    def to_sampling_params(self, max_new_tokens: int, seed: int) -> SamplingParams:
        """How one choice is sampled."""
        same = (
            "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
            "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos",
        )  # fmt: skip
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        logprobs = self.num_logprobs
        if logprobs is None and self.domino.blocks:
            logprobs = 0  # blocks tell how probable their tokens were
        return SamplingParams(
            **given,
            max_new_tokens=max_new_tokens,
            temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
            top_k=max(self.top_k or 0, 0),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            # A context that is full ends a choice all the same.
            min_tokens=min(self.min_tokens or 0, max_new_tokens),
            seed=seed,
            logprobs=logprobs,
            prompt_logprobs=max(
                (top for top in (self.prompt_logprobs, self.echo_logprobs) if top is not None),
                default=None,
            ),
            # The seed is the server's own where the request has none.
            accept=self.domino.accept
            or ("block" if self.seed is None and not self.grammars else "coupled"),
        )

    @model_validator(mode="after")
    def _check_grammar(self) -> BaseCompletionRequest:
        given = list(self.grammars)
        if self.structured_outputs is not None and not given:
            words = "is empty; give json, regex, choice, grammar or json_object, or drop it"
            raise inconsistent("structured_outputs", words)
        if len(given) > 1:
            raise inconsistent(given[1], f"is given together with {given[0]}; give one")
        if given and self.domino.accept in ("block", "rejection"):
            words = f"is {self.domino.accept} with {given[0]}; take coupled or match"
            raise inconsistent("domino.accept", words)
        return self

    @model_validator(mode="after")
    def _check_stream_only(self) -> BaseCompletionRequest:
        if not self.stream and self.domino.blocks:
            raise inconsistent("domino.blocks", "is for streams only; set stream, or drop it")
        if self.stream and self.prompt_logprobs is not None:
            raise inconsistent("prompt_logprobs", "is not for streams; drop it, or stream")
        most = self.max_new_tokens
        if self.min_tokens and most is not None and self.min_tokens > most:
            words = f"is {self.min_tokens}, more than max_tokens, which is {most}"
            raise inconsistent("min_tokens", words)
        return self


UNSUPPORTED_PART = "parts of this type are not supported; give text"
DATA_URL = "data:image/"
_BASE64 = ";base64,"


def only(*types: str, reason: str) -> Callable[[object], object]:
    """A validator that refuses other types by name, as what is not supported."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in types:
            raise PydanticCustomError("unsupported", "{reason}", {"reason": reason})
        return value

    return check


class TextPart(StrictModel, path="messages.content."):
    """A part of a message."""

    type: Annotated[Literal["text"], BeforeValidator(only("text", reason=UNSUPPORTED_PART))]
    text: str

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "text", "text": self.text}


class ImageUrl(StrictModel, path="messages.content.image_url."):
    """An image in a data URL: the server fetches nothing and opens no file."""

    url: str
    detail: Literal["auto"] | None = None

    @field_validator("url")
    @classmethod
    def _check_data(cls, url: str) -> str:
        if not url.lower().startswith(DATA_URL):
            scheme = url.partition(":")[0][:20] if ":" in url else "no scheme"
            words = (
                f"a URL with {scheme} is not supported: the server fetches nothing; send the image "
                "itself as data:image/png;base64,..."
            )
            raise PydanticCustomError("unsupported", "{reason}", {"reason": words})
        if _BASE64 not in url[:100]:
            raise PydanticCustomError("no_base64", "is not base64; expected data:image/png;base64,")
        return url


class ImagePart(StrictModel, path="messages.content."):
    """An image in a user's message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it: the file, in base64."""
        return {"type": "image", "image": self.image_url.url.partition(_BASE64)[2]}


def _part_tag(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "image_url" if kind == "image_url" else "text"


MessageContent = str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]
UserPart = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image_url")],
    Discriminator(_part_tag),
]
UserContent = str | Annotated[list[UserPart], Field(fail_fast=True, min_length=1)]
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]


class FunctionDefinition(StrictModel, path="tools.function."):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = Field(
        default=None, description="JSON schema of an object: the function's arguments."
    )
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise PydanticCustomError("wrong_schema", "arguments are an object; set its type so")
        if nested_deeper(schema, MAX_NESTING):
            raise PydanticCustomError(
                "too_deep", "is nested more than {most} deep", {"most": MAX_NESTING}
            )
        return schema


ToolType = Annotated[
    Literal["function"],
    BeforeValidator(
        only("function", reason="tools of this type are not supported; give functions")
    ),
]


class Tool(StrictModel, path="tools."):
    """A function that the model may call; the client runs it."""

    type: ToolType
    function: FunctionDefinition


class FunctionName(StrictModel, path="tool_choice.function."):
    """A function of the request's tools."""

    name: ToolName


class NamedToolChoice(StrictModel, path="tool_choice."):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


def _check_arguments(text: str) -> str:
    if text and read_object(text) is None:
        raise PydanticCustomError("no_object", "is not a JSON object, as arguments are")
    return text


Arguments = Annotated[str, AfterValidator(_check_arguments)]
"""A JSON object; nothing stands for no arguments."""


class FunctionCall(StrictModel, path="messages.tool_calls.function."):
    """The function that was called, and its arguments as JSON."""

    name: ToolName
    arguments: Arguments
    parsed_arguments: JsonValue = None
    """OpenAI's client keeps them here, and sends them along."""


class ToolCall(StrictModel, path="messages.tool_calls."):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def to_template(self) -> dict[str, Any]:
        """Templates write the arguments as JSON themselves."""
        arguments = read_object(self.function.arguments) or {}
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class BaseMessage(StrictModel, path="messages."):
    """Fields of every message; null where they belong to another role."""

    role: str
    content: Any = None
    name: str | None = None
    refusal: None = None
    annotations: EmptyList | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Any = None
    tool_call_id: Any = None

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it: parts are one text where none is an image."""
        content = self.content or ""
        if not isinstance(content, str):
            content = [part.to_template() for part in content]
            if all(part["type"] == "text" for part in content):
                content = "".join(part["text"] for part in content)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **name}


class TextMessage(BaseMessage):
    """What the model is told."""

    role: Literal["system", "developer", "user"]
    content: UserContent
    tool_calls: EmptyList | None = None
    tool_call_id: None = None

    @field_validator("content")
    @classmethod
    def _check_images(cls, content: UserContent, info: ValidationInfo) -> UserContent:
        user = info.data.get("role") == "user"
        if not user and any(isinstance(part, ImagePart) for part in content):
            raise PydanticCustomError("no_image", "holds an image; only a user's message may")
        return content


class ToolMessage(BaseMessage):
    """What a call gave."""

    role: Literal["tool"]
    content: MessageContent
    tool_call_id: CallId
    tool_calls: EmptyList | None = None

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {**super().to_template(), "tool_call_id": self.tool_call_id}


class AssistantTurn(BaseMessage):
    """What the model wrote, as this server sent it or otherwise."""

    role: Literal["assistant"]
    content: MessageContent | None = None
    reasoning_content: str | None = None
    parsed: JsonValue = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: None = None

    def to_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        message = super().to_template()
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message


ChatMessage = Annotated[TextMessage | AssistantTurn | ToolMessage, Field(discriminator="role")]


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
TemplateKwargs = Annotated[
    dict[str, JsonValue] | None,
    Field(max_length=16, description="Variables of the model's chat template."),
]


def check_tools(names: Sequence[str], choice: object, named: str | None, *, at: str) -> None:
    """Refuse two tools of a name, and the choice of a tool that is not there."""
    for place, name in enumerate(names):
        if name in names[:place]:
            words = f"is {name!r}, as another tool's is; expected one tool of a name"
            raise inconsistent(f"tools[{place}]{at}.name", words)
    if named is not None and named not in names:
        words = f"is {named!r}; expected the name of one of the tools"
        raise inconsistent(f"tool_choice{at}.name", words)
    if choice in ("auto", "required") and not names:
        words = f"is {choice!r} without tools; give some, or leave it out"
        raise inconsistent("tool_choice", words)


class ChatOptions(ApiRequest):
    """How messages and tools become a prompt."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        default=None, description="auto where there are tools."
    )
    chat_template_kwargs: TemplateKwargs = None
    add_generation_prompt: bool | None = Field(
        default=None, description="Whether an answer begins; true, unless a message goes on."
    )
    continue_final_message: bool | None = Field(
        default=None, description="The answer goes on with the last message, which has no end."
    )
    add_special_tokens: AddSpecialTokens = None

    @property
    def template_options(self) -> dict[str, Any]:
        """Options of `apply_chat_template` beyond the template's own variables."""
        if self.continue_final_message:
            return {"add_generation_prompt": False, "continue_final_message": True}
        return {"add_generation_prompt": False} if self.add_generation_prompt is False else {}

    @property
    def functions(self) -> list[FunctionDefinition]:
        """What the model may call."""
        if self.tool_choice == "none":
            return []
        return [tool.function for tool in self.tools or []]

    @property
    def uses_tools(self) -> bool:
        """Whether the messages tell of calls."""
        return any(isinstance(each, ToolMessage) or each.tool_calls for each in self.messages or [])

    @property
    def continued(self) -> str:
        """The text that the answer goes on with, if any."""
        if not (self.continue_final_message and self.messages):
            return ""
        content = self.messages[-1].to_template()["content"]
        if isinstance(content, str):
            return content
        return "".join(part.get("text", "") for part in content)

    def to_template(self) -> list[dict[str, Any]]:
        """The messages as templates take them; some want the function's name with its result."""
        messages: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for message in self.messages or []:
            told = message.to_template()
            if isinstance(message, AssistantTurn):
                names |= {call.id: call.function.name for call in message.tool_calls or []}
            elif isinstance(message, ToolMessage):
                told = {"name": names[message.tool_call_id], **told}
            messages.append(told)
        return messages

    @model_validator(mode="after")
    def _check_options(self) -> ChatOptions:
        if self.continue_final_message and self.add_generation_prompt:
            words = "begins an answer, and continue_final_message goes on with one; set one of them"
            raise inconsistent("add_generation_prompt", words)
        names, choice = [tool.function.name for tool in self.tools or []], self.tool_choice
        named = choice.function.name if isinstance(choice, NamedToolChoice) else None
        check_tools(names, choice, named, at=".function")
        return self

    @model_validator(mode="after")
    def _check_calls(self) -> ChatOptions:
        known: set[str] = set()
        for place, message in enumerate(self.messages or []):
            at = f"messages[{place}]"
            if isinstance(message, AssistantTurn):
                if message.content is None and not (
                    message.tool_calls or message.reasoning_content
                ):
                    raise inconsistent(
                        f"{at}.content", "is null in a message without tool_calls; expected text"
                    )
                known |= {call.id for call in message.tool_calls or []}
            elif isinstance(message, ToolMessage) and message.tool_call_id not in known:
                raise inconsistent(
                    f"{at}.tool_call_id",
                    f"is {message.tool_call_id!r}; expected the id of a call in a message before",
                )
        return self


class ChatCompletionRequest(ChatOptions, BaseCompletionRequest):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    parallel_tool_calls: bool | None = Field(default=None, description="true.")

    @property
    def max_new_tokens(self) -> int | None:
        """By either of its two names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise inconsistent("top_logprobs", "is given without logprobs; set it, or drop this")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise inconsistent("max_tokens", "differs from max_completion_tokens; give one")
        return self


class CompletionRequest(BaseCompletionRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    max_tokens: int | None = Field(
        default=None, ge=0, lt=2**31, description=f"{DEFAULT_COMPLETION_TOKENS} by default."
    )
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = Field(
        default=None, description="The text begins with the prompt, and so do its logprobs."
    )
    best_of: int | None = Field(default=None, ge=1, description="The same as n.")

    @property
    def max_new_tokens(self) -> int | None:
        """By default as few as OpenAI gives."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token."""
        return self.logprobs

    @property
    def echo_logprobs(self) -> int | None:
        """Alternatives for each token of a prompt that is repeated in the text."""
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, all of a kind."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            words = "choices are not selected from several; leave it out or give the same as n"
            raise inconsistent("best_of", words, kind="unsupported")
        return self


class TokenizeRequest(ChatOptions):
    """The body of /tokenize: a text, or the messages of a chat."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) is (self.messages is None):
            raise inconsistent("prompt", "expected either a prompt or messages")
        return self


class DetokenizeRequest(ApiRequest):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def inconsistent(
    param: str, words: str, kind: Literal["inconsistent", "unsupported"] = "inconsistent"
) -> PydanticCustomError:
    """About a parameter that another one makes wrong; pydantic cannot tell which."""
    return PydanticCustomError(kind, "{words}", {"param": param, "words": words})


# Responses: fields that are not set are left out -------------------------------------------------

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(BaseModel):
    """A token that could have been there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the text, with the likeliest at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of the text."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    """The same in the shape of plain completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that is repeated."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token of the prompt, or one that could have been there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, a prompt's own token first; null for its first token, which nothing precedes."""


class PromptTokensDetails(BaseModel):
    """Prompt tokens by where their keys and values came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Drafts that became text, drafts that did not, and tokens of reasoning."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class BlockToken(BaseModel):
    """A committed token."""

    id: int
    text: str
    accepted: bool
    position: int
    probability: float | None
    lost: list[str]
    """Branches of a draft tree that competed here and were not accepted, the best first."""


class DominoBlock(BaseModel):
    """What one cycle committed for one choice."""

    choice: int
    cycle: int
    accepted: int
    tokens: list[BlockToken]


class FunctionCallOutput(BaseModel):
    """The function that is called, and its arguments as the model wrote them."""

    name: str
    arguments: str


class ToolCallOutput(BaseModel):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: FunctionCallOutput


class AssistantMessage(BaseModel):
    """The generated message; null content where there are calls or reasoning alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallOutput] | None = None


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class FunctionCallDelta(BaseModel):
    """The name in a call's first chunk, then pieces of its arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to one of the calls."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallDelta


class ChatDelta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(BaseModel):
    """A choice in a chunk of a chat completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class CompletionChunkChoice(BaseModel):
    """A choice in a chunk of a plain completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(CompletionChunkChoice):
    """A choice of a plain completion."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | None = None


class BaseResponse(BaseModel):
    """Fields of every response and chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletionResponse(BaseResponse):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseResponse):
    """The response of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class BaseChunk(BaseResponse):
    """Fields of every event of a stream."""

    usage: Usage | None = None
    domino: DominoBlock | None = None


class ChatCompletionChunk(BaseChunk):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(BaseChunk):
    """An event of a streamed plain completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of a sequence, prompt and output."""


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The response of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs to use /tokenize in place of a tokenizer of its own."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Version(BaseModel):
    """The server's version."""

    version: str


class Health(BaseModel):
    """Whether requests are taken."""

    status: Literal["ready", "stopping", "failed"]


class ServerInfo(BaseModel):
    """What /v1/domino tells about the server."""

    model: str
    draft: str | None
    speculates: bool
    slots: int
    context: int
    version: str
    device: str
    dtype: str


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: ErrorInfo
