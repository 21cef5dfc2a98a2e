"""What clients get back, as types: they are the OpenAPI description, and mypy holds us to them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

Finish = Literal["stop", "length"]


class TopLogprob(TypedDict):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens that the text is made of."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """The same in the shape of plain completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class PromptDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Of the drafts: those that became part of the answer, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens read and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class BlockToken(TypedDict):
    """A token of a block."""

    id: int
    text: str
    accepted: bool
    position: int
    probability: float | None


class DominoBlock(TypedDict):
    """What one answer committed in one cycle."""

    choice: int
    cycle: int
    accepted: int
    tokens: list[BlockToken]


class Message(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """An answer to a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatReply(TypedDict):
    """Answers to a chat, whole."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict):
    """What comes behind what came before."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """A piece of an answer to a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(TypedDict):
    """One event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    domino: NotRequired[DominoBlock]


class TextChoice(TypedDict):
    """An answer to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish


class TextReply(TypedDict):
    """Answers to prompts, whole."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(TypedDict):
    """A piece of an answer to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(TypedDict):
    """One event of a prompt's stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]
    domino: NotRequired[DominoBlock]


class Model(TypedDict):
    """What is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(TypedDict):
    """All that is served: one."""

    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    """Whether requests are taken."""

    status: Literal["ready", "stopping", "failed"]


class Facts(TypedDict):
    """What anybody may know of the server."""

    model: str
    draft: str | None
    speculates: bool
    slots: int
    context: int
    version: str
    device: str
