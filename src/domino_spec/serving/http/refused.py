"""What OpenAI's API knows and this server does not do: refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_NO_TOOLS = "tools are not supported; leave it out."
_NO_REASONING = "how much the model thinks cannot be set here; see chat_template_kwargs."

WHY_REFUSED = {
    "response_format": "only {'type': 'text'} is supported: answers are not held to a format yet.",
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "logit_bias": "biases of single tokens are not supported; leave it out.",
    "modalities": "only ['text'] is supported.",
    "audio": "only text is supported.",
    "prediction": "predicted outputs are not supported: the drafter predicts by itself.",
    "reasoning_effort": _NO_REASONING,
    "verbosity": "not supported; ask for short or long answers in a message.",
    "web_search_options": "the server searches nothing; leave it out.",
    "store": "nothing is stored here; leave it out.",
    "service_tier": "there is one tier; leave it out.",
    "echo": "the prompt cannot be repeated in the answer; leave it out.",
    "suffix": "text cannot be inserted before a suffix; leave it out.",
    "best_of": "answers are not chosen from several; leave it out or give the same as n.",
}

Empty = Annotated[list[Any], Field(max_length=0)]
EmptyObject = Annotated[dict[str, Any], Field(max_length=0)]


_MOST_FIELDS = 100
"""More than any object has; each unknown one would become an error of its own."""


def few_fields(value: object) -> object:
    """Refuse an object of very many fields before each of them is looked at."""
    if isinstance(value, dict) and len(value) > _MOST_FIELDS:
        raise PydanticCustomError("too_many", "has more than {most} fields", {"most": _MOST_FIELDS})
    return value


class Strict(BaseModel):
    """Takes what is declared, of the declared type, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    _few = model_validator(mode="before")(few_fields)


class PlainText(Strict):
    """The one response format."""

    type: Literal["text"]


class RefusedByBoth(Strict):
    """Parameters of both endpoints that may be given only as what they are without."""

    logit_bias: EmptyObject | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


class RefusedByChat(RefusedByBoth):
    """Those of chats."""

    response_format: PlainText | None = None
    tools: Empty | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Empty | None = None
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


class RefusedByCompletions(RefusedByBoth):
    """Those of plain completions."""

    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = Field(default=None, ge=1, description="The same as n.")
