"""What a chat model wrote, taken apart: reasoning, text, and calls of tools.

Parsers take text in pieces of any size; how it is cut changes nothing about the whole. Whole
responses go through the same parsers as streams.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from domino_spec.grammars.grammar import MAX_NESTING, nested_deeper

THINK, THINK_END = "<think>", "</think>"
TOOL_NAME = r"[a-zA-Z0-9_-]{1,64}"

PieceKind = Literal["reasoning", "content", "call", "arguments"]


class Piece(NamedTuple):
    """What a piece of text adds to a message."""

    kind: PieceKind
    text: str
    """Of a call, the function's name; the arguments that follow are JSON."""


# Formats ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls."""

    begin: str | None = None
    """Written before a call, or before all of them."""
    end: str | None = None
    """Written after it."""
    bare: bool = False
    """Whether a text that begins with JSON may be a call."""
    named: bool = False
    """Whether the function's name may stand before its arguments, outside of the JSON."""
    arguments: str = "arguments"
    """What the JSON calls the arguments; either name is read."""
    listed: bool = False
    """Whether the JSON is a list of calls."""
    other_markers: tuple[str, ...] = ()
    """Other markers, which may be special tokens too."""
    id_prefix: str = "call_"
    id_length: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a special token, which text leaves out."""
        return tuple(
            each for each in (self.begin, self.end, *self.other_markers) if each is not None
        )

    def new_id(self) -> str:
        """A call's id; some templates take ids of one length alone."""
        letters = string.ascii_letters + string.digits
        return self.id_prefix + "".join(secrets.choice(letters) for _ in range(self.id_length))


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": ToolFormat(bare=True, begin="<|python_tag|>", arguments="parameters"),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]", listed=True, named=True, other_markers=("[ARGS]", "[CALL_ID]"),
        id_prefix="", id_length=9,
    ),
    "json": ToolFormat(bare=True),
}  # fmt: skip


def find_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it is none of ours."""
    if "[TOOL_CALLS]" in template:
        return TOOL_FORMATS["mistral"]
    if "<function=" in template:  # inside <tool_call>, but no JSON
        return None
    if "<tool_call>" in template:
        return TOOL_FORMATS["hermes"]
    if "<|python_tag|>" in template or re.search(r'\{\\?"name\\?":.{0,80}"parameters', template):
        return TOOL_FORMATS["llama3_json"]
    return None


def supports_reasoning(template: str) -> bool:
    """Whether a chat template knows reasoning between <think> and </think>."""
    return THINK in template or THINK_END in template


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """How the output of one request is to be read."""

    tools: ToolFormat | None = None
    names: tuple[str, ...] = ()
    parallel: bool = True
    reasoning: bool = False
    reasoning_begun: bool = False
    """Whether the prompt ends inside of reasoning."""
    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are markers, with their text."""
    reasoning_end: int | None = None
    """The token that ends reasoning, where it is one."""


# Reasoning ----------------------------------------------------------------------------------------


class ReasoningParser:
    """Splits text that begins with reasoning; white space around the markers is part of them."""

    def __init__(self, *, active: bool, begun: bool) -> None:
        """`begun`: the prompt ends with the marker that opens reasoning."""
        self.active = active
        """Whether reasoning goes on, or may still begin."""
        self.begun = begun
        self._marked = False
        self._written = False
        self._trims = False
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What it adds to the reasoning, and to what follows it."""
        if not self.active:
            return "", self._trim(text)
        self._held += text
        if not self._marked:  # models may repeat a marker that the prompt ends with
            start = self._held.lstrip()
            if start.startswith(THINK):
                self._held = start[len(THINK) :]
                self._marked = self.begun = True
            elif THINK.startswith(start):
                return "", ""
            elif not self.begun:
                return "", self.finish()[1]
            else:
                self._marked = True
        return self._reason()

    def _reason(self) -> tuple[str, str]:
        held = self._held if self._written else self._held.lstrip()
        found = held.find(THINK_END)
        if found >= 0:
            self.active, self._trims, self._held = False, True, ""
            return held[:found].rstrip(), self._trim(held[found + len(THINK_END) :])
        kept = held[: len(held) - overlap(held, THINK_END)].rstrip()
        self._held = held[len(kept) :]
        self._written = self._written or bool(kept)
        return kept, ""

    def _trim(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        held, self._held, self.active = self._held, "", False
        if not self.begun:
            return "", held
        return ("", "") if not held.strip() else (held, "")


# Messages -----------------------------------------------------------------------------------------

_SPACE = r"[ \t\r\n]{0,99}"
_HEAD = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"({TOOL_NAME})"{_SPACE},{_SPACE}'
    rf'"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
"""A call as nearly all are written: its arguments can be passed on as they come."""
_NAMED = re.compile(
    rf"({TOOL_NAME})(?:\[CALL_ID\][a-zA-Z0-9_-]{{0,64}})?(?:\[ARGS\])?[ \t\r\n]{{0,9}}"
)
_MAX_NAMED_LENGTH = 200


class _Nesting:
    """Where JSON ends: counts brackets outside strings."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def end(self, text: str, start: int) -> tuple[int, bool] | None:
        """After the last bracket, or at a `<`, which no JSON holds: the end and whether it is one.

        None where the text ends first.
        """
        for at in range(start, len(text)):
            letter = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1, True
            elif letter == "<":
                return at, False
        return None


@dataclass
class Call:
    """A call of a message."""

    id: str
    name: str
    arguments: str = ""


class MessageParser:
    """Splits an output into reasoning, text and calls. What turns out to be no call is text.

    A call is passed on from its arguments' first bracket on, as the model writes them: whether they
    are JSON that fits the function only the grammar that they were decoded by can promise.
    """

    def __init__(self, form: MessageFormat) -> None:
        self.reasoning = self.content = ""
        self.calls: list[Call] = []
        self.complete = True
        """Whether the last call has all of its arguments."""
        self.reasoning_parser = ReasoningParser(active=form.reasoning, begun=form.reasoning_begun)
        self._form = form.tools or ToolFormat()
        self._names, self._parallel = frozenset(form.names), form.parallel
        hidden = form.kept.values() if form.tools is not None else ()
        self._hidden = re.compile("|".join(map(re.escape, hidden))) if hidden else None
        self._text = ""
        """Not given out yet; a call that turns out to be none becomes text from its beginning."""
        self._at = 0
        """Up to where it was looked at."""
        self._nesting = _Nesting()
        self._bare = self._form.bare
        self._in_list = self._called = False
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._in_text

    @property
    def done(self) -> bool:
        """Whether nothing that follows counts."""
        return self._state == self._drop

    def push(self, text: str) -> list[Piece]:
        """What the text adds to the message."""
        self._read(*self.reasoning_parser.push(text))
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        self._read(*self.reasoning_parser.finish())
        waits = self._state in (self._after_arguments, self._after_call)  # for the call's end
        if not waits and not (self._called and self._text.isspace()):
            self._emit("content", self._text)
        self._text = ""
        return self._take()

    def _read(self, thought: str, rest: str) -> None:
        self._emit("reasoning", thought)
        self._text += rest
        while self._state():  # until more text is needed
            pass

    def _take(self) -> list[Piece]:
        pieces, self._out = merge(self._out), []
        for kind, text in pieces:
            if kind == "content":
                self.content += text
            elif kind == "reasoning":
                self.reasoning += text
            elif kind == "call":
                self.calls.append(Call(self._form.new_id(), text))
            else:
                self.calls[-1].arguments += text
        return pieces

    def _emit(self, kind: PieceKind, text: str) -> None:
        if kind == "content" and self._hidden is not None:
            text = self._hidden.sub("", text)
        if text:
            self._called = kind in ("call", "arguments")
            self._out.append(Piece(kind, text))

    def _consume(self, end: int) -> str:
        taken, self._text, self._at = self._text[:end], self._text[end:], 0
        return taken

    def _skip_space(self) -> str:
        """The next letter that is none; empty if there is none yet."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    # States: each looks on and says whether the next can -----------------------------------------

    def _in_text(self) -> bool:
        begin, text = self._form.begin, self._text
        if self._bare:
            first = self._skip_space()
            if not first:
                return False
            self._bare = False
            if first in "{[":
                self._state = self._before_call
                return True
        found = -1 if begin is None else text.find(begin)
        if begin is not None and found >= 0:
            shown = text[:found].rstrip()
            self._emit("content", self._consume(len(shown)))
            self._at = found - len(shown) + len(begin)
            self._state = self._before_call
            return True
        # White space before a call is no text; whether this is, the next piece tells.
        shown = text if begin is None else text[: len(text) - overlap(text, begin)].rstrip()
        self._emit("content", self._consume(len(shown)))
        return False

    def _before_call(self) -> bool:
        first = self._skip_space()
        if not first:
            return False
        if first == "[" and not self._in_list:
            self._in_list = True
            self._at += 1
            return True
        if first == "{":
            self._nesting = _Nesting()
            self._start = self._at
            self._state = self._in_call
            return True
        if self._form.named and not self._in_list:
            return self._before_arguments()
        return self._reject(self._at)

    def _before_arguments(self) -> bool:
        """A name, and the arguments as JSON of their own."""
        brace = self._text.find("{", self._at, self._at + _MAX_NAMED_LENGTH)
        if brace < 0:
            waiting = len(self._text) - self._at < _MAX_NAMED_LENGTH
            return False if waiting else self._reject(self._at)
        named = _NAMED.fullmatch(self._text, self._at, brace)
        if named is None or named[1] not in self._names:
            return self._reject(self._at)
        return self._call(named[1], brace, self._after_call)

    def _in_call(self) -> bool:
        head = _HEAD.match(self._text, self._start)
        if head is not None and head[1] in self._names:
            return self._call(head[1], head.end(), self._after_arguments)
        found = self._nesting.end(self._text, self._at)
        if found is None:
            self._at = len(self._text)
            return False
        end, closed = found
        call = read_call(self._text[self._start : end]) if closed else None
        if call is None or call[0] not in self._names:
            return self._reject(end)
        self._consume(end)
        self._emit("call", call[0])
        self._emit("arguments", call[1])
        return self._end_call(self._after_call)

    def _reject(self, end: int) -> bool:
        """It was no call: text up to here."""
        self._emit("content", self._consume(end))
        self._in_list = False
        self._state = self._in_text
        return True

    def _call(self, name: str, arguments: int, then: Callable[[], bool]) -> bool:
        self._emit("call", name)
        self._consume(arguments)
        self.complete = False
        self._nesting = _Nesting()
        self._then = then
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        found = self._nesting.end(self._text, 0)
        if found is None:
            self._emit("arguments", self._consume(len(self._text)))
            return False
        end, closed = found
        self._emit("arguments", self._consume(end))
        return self._end_call(self._then if closed else self._after_call)

    def _end_call(self, then: Callable[[], bool]) -> bool:
        self.complete = True
        self._state = then if self._parallel else self._drop
        return True

    def _after_arguments(self) -> bool:
        """In the call's object: its end, or something else that is told about the call."""
        first = self._skip_space()
        if not first:
            return False
        if first == ",":
            self._nesting = _Nesting(depth=1)
            self._state = self._after_key
        else:
            self._consume(self._at + (first == "}"))
            self._state = self._after_call
        return True

    def _after_key(self) -> bool:
        found = self._nesting.end(self._text, 0)
        self._consume(len(self._text) if found is None else found[0])
        if found is None:
            return False
        self._state = self._after_call
        return True

    def _after_call(self) -> bool:
        first, end = self._skip_space(), self._form.end
        rest = self._text[self._at :]
        if not first or (end is not None and end != rest and end.startswith(rest)):
            return False
        if self._in_list and first in ",]":
            self._at += 1
            if first == ",":
                self._state = self._before_call
            else:
                self._consume(self._at)
                self._in_list = False
        elif end is not None and rest.startswith(end):
            self._consume(self._at + len(end))
            self._in_list = False
            self._state = self._in_text
        elif self._form.bare and first in ";{":
            self._at += first == ";"
            self._state = self._before_call
        else:
            self._at, self._in_list = 0, False
            self._state = self._in_text
        return True

    def _drop(self) -> bool:
        self._consume(len(self._text))
        return False


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call as a JSON object, however its keys are ordered."""
    call = read_object(text) or {}
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside of JSON
        arguments = read_object(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    written = json.dumps(arguments, ensure_ascii=False)
    if not written.isascii() and any("\ud800" <= letter <= "\udfff" for letter in written):
        written = json.dumps(arguments)  # half of a surrogate pair can be written escaped alone
    return name, written


def read_object(text: str) -> dict[str, Any] | None:
    """A JSON object; None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not nested_deeper(value, MAX_NESTING) else None


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text could be the beginning of the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def merge(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of a kind in one, without empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        if not piece.text:
            continue
        if merged and merged[-1].kind == piece.kind != "call":
            piece = Piece(piece.kind, merged.pop().text + piece.text)
        merged.append(piece)
    return merged
