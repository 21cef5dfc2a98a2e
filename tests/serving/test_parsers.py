"""Reasoning, text and calls in what a model wrote, however the text is cut."""

import json
import random

import pytest

from domino_spec.serving.parsers import (
    TOOL_FORMATS,
    MessageFormat,
    MessageParser,
    find_tool_format,
    merge,
    supports_reasoning,
)

NAMES = ("add", "get_weather")
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'
WEATHER = '{"name": "get_weather", "parameters": {"city": "Köln"}}'


def form(name, **how):
    return MessageFormat(tools=TOOL_FORMATS[name], names=NAMES, **how)


def read(shape, *texts):
    """Reasoning, content, and calls with their arguments."""
    parser, pieces = MessageParser(shape), []
    for text in texts:
        pieces += parser.push(text)
    pieces = merge([*pieces, *parser.finish()])
    assert all(piece.text for piece in pieces)
    said = {
        kind: "".join(each.text for each in pieces if each.kind == kind)
        for kind in ("reasoning", "content")
    }
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
    assert [[each.name, each.arguments] for each in parser.calls] == calls
    return said["reasoning"], said["content"], [tuple(call) for call in calls]


def calls(name, text, **how):
    return read(form(name, **how), text)[1:]


CALL = ("add", ARGUMENTS)
KÖLN = ("get_weather", '{"city": "Köln"}')


@pytest.mark.parametrize(("name", "text", "content", "found"), [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", [CALL]),
    ("hermes", f"See.\n\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{WEATHER}</tool_call>\n",
     "See.", [CALL, KÖLN]),
    ("hermes", f"<tool_call>{ADD}</tool_call>\nDone. ", "\nDone. ", [CALL]),
    ("hermes", f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", "", [CALL, KÖLN]),
    ("hermes", "a <b> c <tool_", "a <b> c <tool_", []),
    ("hermes", ADD, ADD, []),
    ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>!',
     '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>!', []),
    ("hermes", f"<tool_call>no <tool_call>{ADD}</tool_call>", "<tool_call>no", [CALL]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> x', " x",
     [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, </tool_call> x', " x",
     [("add", '{"a": 1, ')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>\\""}, "id": "}"}', "",
     [("add", '{"a": "</tool_call>\\""}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"a": "é"}, "name": "add"}</tool_call>', "",
     [("add", '{"a": "é"}')]),
    ("hermes", '<tool_call>{"x": 1, "name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
    ("hermes", '<tool_call>{"x": "\\ud800", "name": "add", "arguments": {"a": "\\ud800"}}', "",
     [("add", '{"a": "\\ud800"}')]),
    ("llama3_json", WEATHER, "", [KÖLN]),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {ADD}", "", [KÖLN, CALL]),
    ("llama3_json", f"\n{WEATHER}\n{ADD}", "", [KÖLN, CALL]),
    ("llama3_json", f"See: {WEATHER}", f"See: {WEATHER}", []),
    ("llama3_json", '{"name": "Bob", "age": 3} is JSON', '{"name": "Bob", "age": 3} is JSON', []),
    ("llama3_json", "Hm. <|python_tag|>print(1)", "Hm. <|python_tag|>print(1)", []),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {WEATHER}]", "", [CALL, KÖLN]),
    ("mistral", f"Hi [TOOL_CALLS][{ADD}] there", "Hi there", [CALL]),
    ("mistral", f'[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{{}}', "",
     [CALL, ("get_weather", "{}")]),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    ("mistral", f'[TOOL_CALLS][{ADD}, {{"name": "rm"}}]', ', {"name": "rm"}]', [CALL]),
    ("json", ADD, "", [CALL]),
    ("json", f" [{ADD},\n{WEATHER}]", "", [CALL, KÖLN]),
    ("json", "[1] and so on", "[1] and so on", []),
    ("json", "{", "{", []),
    ("json", " \n", " \n", []),
])  # fmt: skip
def test_calls(name, text, content, found):
    assert calls(name, text) == (content, found)
    assert read(form(name), *text) == read(form(name), text), "letter by letter"


def test_a_call_is_told_as_it_is_written():
    parser = MessageParser(form("hermes"))
    told = [merge(parser.push(text)) for text in (
        "Well. ", "<tool_call>", '\n{"name": "ad', 'd", "arguments": ', '{"a"', ": 1}", "}\n</tool",
        "_call>", " ",
    )]  # fmt: skip
    assert [[tuple(piece) for piece in pieces] for pieces in told] == [
        [("content", "Well.")], [], [], [], [("call", "add"), ("arguments", '{"a"')],
        [("arguments", ": 1}")], [], [], [],
    ]  # fmt: skip
    assert parser.finish() == []
    assert parser.complete


def test_a_call_that_is_cut_off_is_not_whole():
    parser = MessageParser(form("hermes"))
    parser.push('<tool_call>{"name": "add", "arguments": {"a": [')
    assert (parser.finish(), len(parser.calls), parser.complete) == ([], 1, False)
    text = '<tool_call>{"name": "add", "argu'
    assert calls("hermes", text) == (text, []), "nothing is lost that is no call yet"


def test_one_call_alone():
    text = f"<tool_call>{ADD}</tool_call>\n<tool_call>{WEATHER}</tool_call> more"
    assert calls("hermes", text, parallel=False) == ("", [CALL])
    parser = MessageParser(form("hermes", parallel=False))
    parser.push(text[: len("<tool_call>") + len(ADD) - 2])
    assert not parser.done
    parser.push("}")
    assert parser.done


def test_special_tokens_are_no_text():
    shape = form("mistral", kept={5: "[TOOL_CALLS]"})
    assert read(shape, "[TOOL_CALLS] what?") == ("", " what?", [])
    assert read(shape, f"[TOOL_CALLS][{ADD}]") == ("", "", [CALL])


@pytest.mark.parametrize(("text", "begun", "expected"), [
    ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
    ("\n<think>Hm. ", False, ("Hm.", "")),
    ("Hm.</think>Yes.\n", True, ("Hm.", "Yes.\n")),
    ("<think>\nHm.</think>Yes.", True, ("Hm.", "Yes.")),
    ("Yes <think>x</think>", False, ("", "Yes <think>x</think>")),
    ("  Yes", False, ("", "  Yes")),
    ("a < b </thin", True, ("a < b </thin", "")),
    ("<thi", False, ("", "<thi")),
    ("<think></think>\n<think>", False, ("", "<think>")),
])  # fmt: skip
def test_reasoning(text, begun, expected):
    shape = MessageFormat(reasoning=True, reasoning_begun=begun)
    assert read(shape, text)[:2] == expected
    assert read(shape, *text)[:2] == expected


def test_calls_in_reasoning_are_thoughts():
    shape = form("hermes", reasoning=True)
    text = f"<think><tool_call>{ADD}</tool_call></think>\n<tool_call>{WEATHER}</tool_call>"
    assert read(shape, text) == (f"<tool_call>{ADD}</tool_call>", "", [KÖLN])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>",
    "</think>", ADD, WEATHER, f"<tool_call>{ADD}</tool_call>", f"[TOOL_CALLS][{ADD}, ",
    '{"name": "add", ', '"arguments": ', "{}", "{", "}", "[", "]", ",", ";", '"', "\\",
    " ", "\n", "text", "<", "add", '{"name": "rm", "arguments": {"x": 1}}', "é",
]  # fmt: skip


def test_how_a_text_is_cut_changes_nothing():
    draw = random.Random(7)
    found = 0
    for _ in range(600):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 12)))
        shape = form(
            draw.choice([*TOOL_FORMATS]), reasoning=draw.random() < 0.3,
            reasoning_begun=draw.random() < 0.3, parallel=draw.random() < 0.8,
        )  # fmt: skip
        whole = read(shape, text)
        found += bool(whole[2])
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, len(text))))
        pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
        assert read(shape, *pieces) == whole, (text, pieces)
    assert found > 60


def test_nothing_but_markers_and_white_space_is_lost():
    draw = random.Random(8)
    for _ in range(500):
        text = "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 12)))
        reasoning, content, found = read(form("hermes"), text)
        assert not reasoning
        if not found:
            assert content == text


QWEN = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>\\n{"name": <function-name>, "arguments": <arguments>}\\n</tool_call>{% endif %}"""
LLAMA = """{%- if tools is not none %}{{- 'Respond in the format
{"name": function name, "parameters": dictionary of arguments}.' }}{% endif %}"""


def test_the_template_says_which_format():
    assert find_tool_format(QWEN) is TOOL_FORMATS["hermes"]
    assert find_tool_format(LLAMA) is TOOL_FORMATS["llama3_json"]
    assert find_tool_format("{{ '[TOOL_CALLS] [' }}") is TOOL_FORMATS["mistral"]
    assert find_tool_format("<tool_call><function=f><parameter=x>") is None
    assert find_tool_format("{{ tools }}") is None
    assert supports_reasoning("{% if enable_thinking %}<think>{% endif %}")
    assert not supports_reasoning(QWEN)


def test_ids_fit_the_templates():
    assert len(TOOL_FORMATS["mistral"].new_id()) == 9
    assert TOOL_FORMATS["mistral"].new_id().isalnum()
    assert TOOL_FORMATS["hermes"].new_id().startswith("call_")
    assert json.dumps(TOOL_FORMATS["hermes"].new_id()) != json.dumps(
        TOOL_FORMATS["hermes"].new_id()
    )
