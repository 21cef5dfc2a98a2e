"""How chats with this model are written: tools in the prompt, calls and reasoning in the output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from domino_spec.decoding import SamplingParams, StopRule, TextStream
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.sequence import STOP
from domino_spec.errors import InputError
from domino_spec.grammars import Grammar
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import ApiError, at_param
from domino_spec.serving.message_grammar import message_grammar
from domino_spec.serving.parsers import (
    THINK,
    THINK_END,
    TOOL_FORMATS,
    MessageFormat,
    MessageParser,
    find_tool_format,
    supports_reasoning,
)
from domino_spec.serving.protocol import ChatCompletionRequest, ChatOptions, NamedToolChoice
from domino_spec.serving.tokenization import TokenTexts

_SINGLE = "single tool-call"
"""In templates whose authors allow one call a message."""
_TAIL = 8
"""Tokens at a prompt's end that may open reasoning."""


class ChatFormat:
    """What the model's chat template knows, and how its output is read."""

    def __init__(self, texts: TokenTexts, config: ServerConfig) -> None:
        self._texts, self._config = texts, config
        self.template = str(getattr(texts.tokenizer, "chat_template", None) or "")
        calls, reasoning = config.tool_call_parser, config.reasoning_parser
        self.tools = find_tool_format(self.template) if calls == "auto" else TOOL_FORMATS.get(calls)
        """How calls are written, if that is known."""
        known = reasoning == "auto" and supports_reasoning(self.template)
        self.reasoning = known or reasoning == "think"
        """Whether reasoning may precede the text."""
        added = getattr(texts.tokenizer, "added_tokens_decoder", None) or {}
        self._added = {str(entry.content): int(token) for token, entry in added.items()}

    def template_options(self, request: ChatOptions) -> dict[str, Any]:
        """Tools for the template; refused where it would not tell the model of them."""
        if request.uses_tools and "tool" not in self.template:
            raise _unsupported(
                "messages",
                "the model's chat template knows neither tool_calls nor the role tool; leave such "
                "messages out, or serve a model whose template knows them",
            )
        functions = request.functions
        if not functions:
            return {}
        if self._config.tool_call_parser == "none":
            raise _unsupported(
                "tools", "this server was started with --tool-call-parser none; leave them out"
            )
        if not re.search(r"\btools\b", self.template):
            raise _unsupported(
                "tools",
                "the model's chat template has no variable tools, so that the model would not see "
                "them; leave them out, or serve a model whose template has one",
            )
        if self.tools is None:
            raise _unsupported(
                "tools",
                "the model's chat template describes calls in a format that is not known here; "
                f"start the server with --tool-call-parser ({', '.join(TOOL_FORMATS)}) if it is "
                "one of these",
            )
        told = [function.model_dump(exclude_unset=True) for function in functions]
        return {"tools": [{"type": "function", "function": each} for each in told]}

    def message_format(
        self, request: ChatCompletionRequest, prompt: Sequence[int]
    ) -> MessageFormat:
        """How the output after this prompt is read."""
        functions, choice = request.functions, request.tool_choice
        names = tuple(function.name for function in functions)
        # Several calls could not be given back to a template that takes one a message.
        parallel = request.parallel_tool_calls is not False and _SINGLE not in self.template
        begun = self.reasoning and (
            self._texts.text_of(*prompt[-_TAIL:]).rstrip().endswith(THINK)
            or request.continued.rfind(THINK) > request.continued.rfind(THINK_END)
        )
        tools = self.tools if functions else None
        if isinstance(choice, NamedToolChoice):
            names, parallel = (choice.function.name,), False
        markers = set() if tools is None else set(tools.markers)
        markers |= {THINK, THINK_END} if self.reasoning else set()
        added = {name: self._added[name] for name in markers & self._added.keys()}
        return MessageFormat(
            tools=tools,
            names=names,
            parallel=parallel,
            reasoning=self.reasoning,
            reasoning_begun=begun,
            kept={added[name]: name for name in added if self._texts.is_special(added[name])},
            reasoning_end=added.get(THINK_END),
        )

    def grammar(
        self, request: ChatCompletionRequest, form: MessageFormat
    ) -> tuple[str, Grammar] | None:
        """What the output must match, with the parameter that says so.

        Calls that are required, and those of strict functions, fit their schemas.
        """
        param, content = "tools", None
        for param, make in request.grammars.items():  # one at most
            with at_param(param):
                content = make()
        named = [each for each in request.functions if each.name in form.names]
        required = isinstance(request.tool_choice, NamedToolChoice)
        required = required or request.tool_choice == "required"
        if content is None and not (required or any(each.strict for each in named)):
            return None
        if request.domino.accept in ("block", "rejection"):
            with at_param("domino.accept"):
                raise InputError(
                    f"domino.accept: is {request.domino.accept} where {param} say what the output "
                    "must match; take coupled or match."
                )
        if content is not None and not (named or form.reasoning):
            return param, content
        found = message_grammar(form, named, required=required, content=content)
        if found is None and not (named or form.reasoning_begun):
            found = content  # the model reasons about nothing then
        if found is None:
            with at_param(param):
                raise InputError(
                    f"{param} goes neither with tools nor after reasoning that the template opens; "
                    "give a JSON schema, a regular expression or choices instead."
                )
        return param, found


def after_one_call(form: MessageFormat, tokenizer: Any, params: SamplingParams) -> StopRule:
    """Stop where no further call is to follow. One rule serves one sequence."""
    skip, parser = params.skip_special_tokens, MessageParser(form)
    text = TextStream(tokenizer, kept=form.kept, skip_special_tokens=skip)

    def rule(sequence: Decoded) -> str | None:
        parser.push(text.push(sequence.output[-1]))
        return STOP if parser.done else None

    return rule


def _unsupported(param: str, words: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: {words}.",
        code="unsupported_parameter",
        param=param,
    )
