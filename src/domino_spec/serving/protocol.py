"""Requests and responses of OpenAI's API, and this server's extensions of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from domino_spec.decoding import SamplingParams
from domino_spec.settings import AcceptRule

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""As OpenAI's completions."""
_MAX_FIELDS = 100
"""More than any object has; each unknown one would become an error of its own."""
_MIN_TEMPERATURE = 1e-5
"""Logits divided by less leave float32's range; the likeliest token has all the weight anyway."""

_NO_TOOLS = "tools are not supported; leave it out"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (
        ({"type": "text"},),
        "only {'type': 'text'} is supported: there is no structured output yet",
    ),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((False, True), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "logit_bias": (({},), "biases of single tokens are not supported; leave it out"),
    "modalities": ((["text"],), "only ['text'] is supported"),
    "audio": ((), "only text is supported"),
    "prediction": ((), "predicted outputs are not supported: the drafter predicts by itself"),
    "reasoning_effort": ((), "the amount of reasoning cannot be set; see chat_template_kwargs"),
    "verbosity": ((), "not supported; ask for short or long answers in a message"),
    "web_search_options": ((), "the server searches nothing; leave it out"),
    "store": ((False,), "nothing is stored here; leave it out"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "echo": ((False,), "the prompt cannot be repeated in the response; leave it out"),
    "suffix": (("",), "text cannot be inserted before a suffix; leave it out"),
}
"""Parameters of OpenAI's API that are refused by name, never ignored, and what to do instead; null
and the values that change nothing are taken."""

# Requests -----------------------------------------------------------------------------------------


def limit_fields(value: object) -> object:
    """Refuse an object of very many fields before each of them is validated."""
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise PydanticCustomError("too_many", "has more than {most} fields", {"most": _MAX_FIELDS})
    return value


class StrictModel(BaseModel):
    """Takes declared fields of the declared type and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _limit_fields = model_validator(mode="before")(limit_fields)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
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


class StreamOptions(StrictModel):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class BaseRequest(StrictModel):
    """Parameters of both endpoints."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Choices; 1.")
    stop: (
        StopString
        | Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
        | None
    ) = Field(default=None, description="Text that ends a choice and is not part of it.")
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
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: Annotated[
        dict[str, str] | None, Field(max_length=16), BeforeValidator(limit_fields)
    ] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    domino: DominoOptions = DominoOptions()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, value: object) -> object:
        if not isinstance(value, dict) or not (given := UNSUPPORTED.keys() & value.keys()):
            return value
        for name in sorted(given):
            harmless, reason = UNSUPPORTED[name]
            if value[name] is not None and value[name] not in harmless:
                raise _inconsistent(name, reason, kind="unsupported")
        return {name: each for name, each in value.items() if name not in given}

    @field_validator("domino", mode="before")
    @classmethod
    def _default_options(cls, value: object) -> object:
        return DominoOptions() if value is None else value

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
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_sampling_params(self, max_new_tokens: int, seed: int) -> SamplingParams:
        """How one choice is sampled."""
        temperature = 1.0 if self.temperature is None else self.temperature
        logprobs = self.num_logprobs
        if logprobs is None and self.domino.blocks:
            logprobs = 0  # blocks tell how probable their tokens were
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            # The seed is the server's own where the request has none.
            accept=self.domino.accept or ("block" if self.seed is None else "coupled"),
        )

    @model_validator(mode="after")
    def _check_stream_only(self) -> BaseRequest:
        if not self.stream and self.stream_options is not None:
            raise _inconsistent("stream_options", "is for streams only; set stream, or drop it")
        if not self.stream and self.domino.blocks:
            raise _inconsistent("domino.blocks", "is for streams only; set stream, or drop it")
        return self


class TextPart(StrictModel):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, kind: object) -> object:
        if kind != "text" and isinstance(kind, str):
            raise PydanticCustomError(
                "unsupported", "parts of this type are not supported: the model reads text alone"
            )
        return kind


class ChatMessage(StrictModel):
    """A message. An assistant's may come as this server sent it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]
    name: str | None = None
    refusal: None = None
    annotations: EmptyList | None = None
    audio: None = None
    tool_calls: EmptyList | None = None
    function_call: None = None

    @field_validator("role", mode="before")
    @classmethod
    def _check_role(cls, role: object) -> object:
        if role in ("tool", "function"):
            raise PydanticCustomError("unsupported", "tools are not supported")
        return role

    def to_template(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatCompletionRequest(BaseRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        default=None, max_length=16, description="Variables of the model's chat template."
    )

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
        if self.top_logprobs is not None and not self.logprobs:
            raise _inconsistent("top_logprobs", "is given without logprobs; set it, or drop this")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _inconsistent("max_tokens", "differs from max_completion_tokens; give one")
        return self


class CompletionRequest(BaseRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    max_tokens: int | None = Field(
        default=None, ge=1, lt=2**31, description=f"{DEFAULT_COMPLETION_TOKENS} by default."
    )
    logprobs: int | None = Field(default=None, ge=0, le=5)
    best_of: int | None = Field(default=None, ge=1, description="The same as n.")

    @property
    def max_new_tokens(self) -> int | None:
        """By default as few as OpenAI gives."""
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token."""
        return self.logprobs

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
            raise _inconsistent("best_of", words, kind="unsupported")
        return self


def _inconsistent(
    param: str, words: str, kind: Literal["inconsistent", "unsupported"] = "inconsistent"
) -> PydanticCustomError:
    """About a parameter that another one makes wrong; pydantic cannot tell which."""
    return PydanticCustomError(kind, "{words}", {"param": param, "words": words})


# Responses: fields that are not set are left out -------------------------------------------------

FinishReason = Literal["stop", "length"]


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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class PromptTokensDetails(BaseModel):
    """Prompt tokens by where their keys and values came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Drafts that became text, and drafts that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


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


class AssistantMessage(BaseModel):
    """The generated message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class CompletionChoice(BaseModel):
    """A choice of a plain completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class ChatDelta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(BaseModel):
    """A choice in a chunk of a chat completion."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunkChoice(BaseModel):
    """A choice in a chunk of a plain completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


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


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


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
