"""What clients send: OpenAI's parameters that change an answer, and a few of our own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticCustomError

from domino_spec.serving.http.refused import (
    WHY_REFUSED,
    Empty,
    RefusedByBoth,
    RefusedByChat,
    RefusedByCompletions,
    Strict,
    few_fields,
)

MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 1024
COMPLETION_TOKENS = 16
"""What OpenAI's completions give when nobody says how many."""

StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class DominoOptions(Strict):
    """What this server does beyond OpenAI's API."""

    blocks: bool = Field(
        default=False,
        description="Every streamed chunk tells its block: which tokens were drafts, and how "
        "probable each was.",
    )
    speculate: bool = Field(
        default=True, description="Without drafts the text is the same; it takes longer."
    )
    reuse: bool = Field(
        default=True,
        description="Without, the whole prompt is read anew: for those who compare times.",
    )


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Asked(RefusedByBoth):
    """Parameters of both endpoints."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES, description="Answers; 1.")
    stop: (
        StopString
        | Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
        | None
    ) = Field(default=None, description="Text that ends an answer and is not part of it.")
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
        dict[str, str] | None, Field(max_length=16), BeforeValidator(few_fields)
    ] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    domino: DominoOptions | None = None

    @property
    def ours(self) -> DominoOptions:
        """What is asked beyond OpenAI's API."""
        return self.domino or DominoOptions()

    @property
    def most_tokens(self) -> int | None:
        """New tokens asked for; None leaves it to the server."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    @abstractmethod
    def scores(self) -> int | None:
        """Alternatives for each token of the answer; None if no log-probabilities are wanted."""

    @model_validator(mode="after")
    def _streaming_alone(self) -> Asked:
        if not self.stream and self.stream_options is not None:
            raise _wrong("stream_options", "is for streams alone; set stream, or leave it out")
        if not self.stream and self.ours.blocks:
            raise _wrong("domino.blocks", "is for streams alone; set stream, or leave it out")
        return self


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, kind: object) -> object:
        if kind != "text" and isinstance(kind, str):
            raise PydanticCustomError(
                "unsupported", "parts of this type are not supported: the model reads text alone"
            )
        return kind


class ChatMessage(Strict):
    """A turn. An assistant's may come as this server sent it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)]
    name: str | None = None
    refusal: None = None
    annotations: Empty | None = None
    audio: None = None
    tool_calls: Empty | None = None
    function_call: None = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, role: object) -> object:
        if role in ("tool", "function"):
            raise PydanticCustomError("unsupported", "tools are not supported")
        return role

    @property
    def text(self) -> str:
        """All it says."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatAsked(Asked, RefusedByChat):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        default=None, max_length=16, description="Variables of the model's chat template."
    )

    @property
    def most_tokens(self) -> int | None:
        """By either of its two names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """Alternatives for each token of the answer."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _consistent(self) -> ChatAsked:
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "is given without logprobs; set it, or leave this out")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _wrong("max_tokens", "differs from max_completion_tokens; give one of them")
        return self


class CompletionAsked(Asked, RefusedByCompletions):
    """A body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1)]
    )
    max_tokens: int | None = Field(
        default=None, ge=1, lt=2**31, description=f"{COMPLETION_TOKENS} unless told."
    )
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def most_tokens(self) -> int | None:
        """New tokens asked for, or as few as OpenAI gives."""
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def scores(self) -> int | None:
        """Alternatives for each token of the answer."""
        return self.logprobs

    @model_validator(mode="after")
    def _no_choosing(self) -> CompletionAsked:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _wrong("best_of", WHY_REFUSED["best_of"])
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several, all of a kind."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


def _wrong(param: str, words: str) -> PydanticCustomError:
    """About a parameter that another one makes wrong; pydantic cannot tell which."""
    return PydanticCustomError("inconsistent", "{words}", {"param": param, "words": words})
