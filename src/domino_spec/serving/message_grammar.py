"""The grammar of a message: reasoning, and calls that fit their functions, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from domino_spec.grammars import Grammar
from domino_spec.serving.parsers import THINK, THINK_END, MessageFormat
from domino_spec.serving.protocol import FunctionDefinition

_TEXT = "/(?s:.*)/"
_GAP = r"/[ \n]?/"


def message_grammar(
    form: MessageFormat,
    functions: Sequence[FunctionDefinition] = (),
    *,
    required: bool = False,
    content: Grammar | None = None,
) -> Grammar | None:
    """Reasoning as the format has it, then calls of these functions, or text if none is required.

    `content` is what that text must match as a whole; None is returned where it cannot be part of
    another grammar.
    """
    rules = _Rules(form)
    text = None if content is None else content_rule(content)
    if content is not None and text is None:
        return None
    if text is not None:
        rules.add("content", text)
    if functions:
        rules.add_calls(functions, required=required, content=text is not None)
    else:
        rules.add("message", "content")
    return Grammar.grammar(rules.text())


def content_rule(grammar: Grammar) -> str | None:
    """A grammar as a rule of another one; None for one that has rules of its own."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if grammar.lenient and isinstance(schema, dict):
            schema = _lenient(schema)
        return f"%json {json.dumps(schema, ensure_ascii=False)}"
    if grammar.kind == "regex":
        return "/" + grammar.text.replace("/", r"\/").replace("\n", r"\n") + "/"
    if grammar.kind == "choice":
        return " | ".join(map(_string, json.loads(grammar.text)))
    return None


class _Rules:
    """Rules of one grammar; markers that are special tokens are asked for by their ids."""

    def __init__(self, form: MessageFormat) -> None:
        self._form = form
        self._ids = {name: token for token, name in form.kept.items()}
        self._rules: list[str] = []

    def add(self, name: str, rule: str) -> str:
        self._rules.append(f"{name}: {rule}")
        return name

    def text(self) -> str:
        """The grammar."""
        start = "message"
        if self._form.reasoning:
            thought = rf"{self._text_until(THINK_END)} /\s*/"
            if not self._form.reasoning_begun:
                thought = f"({self._marker(THINK)} {thought})?"
            start = f"{thought} message"
        return "\n".join([f"start: {start}", *self._rules])

    def add_calls(
        self, functions: Sequence[FunctionDefinition], *, required: bool, content: bool
    ) -> None:
        form, parallel = self._form.tools, self._form.parallel
        assert form is not None
        self.add("call", " | ".join(f"call{place}" for place in range(len(functions))))
        for place, function in enumerate(functions):
            head = _string(f'{{"name": "{function.name}", "{form.arguments}": ')
            self.add(f"call{place}", f'{head} arguments{place} "}}"')
            schema = json.dumps(_schema(function), ensure_ascii=False)
            self.add(f"arguments{place}", f"%json {schema}")
        if form.bare or form.begin is None:
            calls = 'call ("; " call)*' if parallel else "call"
            # Text where JSON at its beginning would be a call, and a marker reasoning.
            marker = "<" if self._form.reasoning else ""
            text = "content" if content else rf"/(\s*[^\s{{\[{marker}](?s:.*))?/"
            self.add("message", calls if required else f"{calls} | {text}")
            return
        more = '(", " call)*' if parallel else ""
        listed = f'"[" call {more} "]"'
        end = "" if form.end is None else f"{_GAP} {self._marker(form.end)}"
        self.add("body", f"{_GAP} {listed if form.listed else 'call'} {end}")
        begin, several = self._marker(form.begin), parallel and not form.listed
        calls = f"{begin} body" + (f" ({_GAP} {begin} body)*" if several else "")
        if required or content:
            self.add("message", calls if required else f"{calls} | content")
        else:
            again = "*" if several else "?"
            self.add("message", f"({self._text_until(form.begin)} body){again} {_TEXT}")

    def _marker(self, name: str) -> str:
        return f"<[{self._ids[name]}]>" if name in self._ids else _string(name)

    def _text_until(self, name: str) -> str:
        """Any text up to and with a marker."""
        if name in self._ids:  # which text cannot hold
            return f"{_TEXT} {self._marker(name)}"
        ending = re.escape(name).replace("/", r"\/")
        rule = f"until{len(self._rules)}"
        self.add(f"{rule}[lazy]", f"/(?s:.*){ending}/")
        return rule


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """What of a schema cannot be enforced is refused for strict functions alone."""
    schema = function.parameters or {"type": "object"}
    return schema if function.strict else _lenient(schema)


def _lenient(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"lenient": True}}


def _string(text: str) -> str:
    """Escaped as in JSON; the one control character that JSON leaves alone is no Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\x7f")
