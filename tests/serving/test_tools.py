"""Tools and reasoning in chats and in the Responses API, whole and streamed, by OpenAI's client."""

import asyncio
import functools
import json
from dataclasses import replace

import openai
import pytest

from domino_spec.api import DominoDecoder
from domino_spec.errors import InputError
from domino_spec.serving.protocol import ChatCompletionChunk, ChatCompletionRequest
from domino_spec.serving.responses import ResponseEvent
from tests.cli import tiny
from tests.serving.conftest import HELLO, Client, error_of, events
from tests.serving.fake import MODEL
from tests.serving.live import live
from tests.serving.scripted import TEMPLATE, client_of, make_scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [
    {"name": "get_weather", "description": "Now.", "parameters": CITY},
    {"name": "get_time", "parameters": CITY},
]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]
FLAT = [{"type": "function", "strict": None, **each} for each in FUNCTIONS]
KÖLN = '{"city": "Köln"}'


def call(name, arguments=KÖLN):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BOTH = f"One moment.\n{call('get_weather')}\n{call('get_time')}"
RESULTS = {"get_weather": "12 degrees", "get_time": "noon"}


def ask(*texts, tools=TOOLS, config=None, template=TEMPLATE, special=(), **body):
    service = make_scripted(*texts, template=template, special_tokens=special, **config or {})
    client = Client(service)
    return client.chat(tools=tools, **body), service


def message_of(reply):
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["message"], choice["finish_reason"]


def put_together(chunks, index=0):
    """A streamed message as a whole one has it, and its end."""
    message, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for choice in (each for chunk in chunks for each in chunk["choices"]):
        if choice["index"] != index:
            continue
        delta, reason = choice["delta"], choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for each in delta.get("tool_calls", ()):
            if "id" in each:
                assert each["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"id": each["id"], **each["function"]})
                assert each["function"]["arguments"] == ""
            else:
                message["tool_calls"][each["index"]]["arguments"] += each["function"]["arguments"]
    return message, reason


# An agent -----------------------------------------------------------------------------------------


async def chat_agent(client, stream):
    """Asks until the model calls nothing more."""
    messages = [{"role": "user", "content": "How is Köln?"}]
    for _ in range(3):
        if stream:
            how = {"model": MODEL, "messages": messages, "tools": TOOLS}
            async with client.chat.completions.stream(**how) as events:
                async for _ in events:
                    pass
                reply = await events.get_final_completion()
        else:
            reply = await client.chat.completions.create(
                model=MODEL, messages=messages, tools=TOOLS
            )
        choice = reply.choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            return choice.message.content
        for each in choice.message.tool_calls:
            assert json.loads(each.function.arguments) == {"city": "Köln"}
            result = RESULTS[each.function.name]
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    raise AssertionError("it never answered")


async def responses_agent(client, stream):
    items = [{"role": "user", "content": "How is Köln?"}]
    for _ in range(3):
        how = {"model": MODEL, "input": items, "tools": FLAT, "store": False}
        if stream:
            async with client.responses.stream(**how) as events:
                async for _ in events:
                    pass
                reply = await events.get_final_response()
        else:
            reply = await client.responses.create(**how)
        calls = [item for item in reply.output if item.type == "function_call"]
        items += [item.to_dict() for item in reply.output]
        if not calls:
            return reply.output_text
        for each in calls:
            assert json.loads(each.arguments) == {"city": "Köln"}
            given = {"call_id": each.call_id, "output": RESULTS[each.name]}
            items.append({"type": "function_call_output", **given})
    raise AssertionError("it never answered")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [chat_agent, responses_agent])
def test_an_agent_calls_two_tools_and_answers(agent, stream):
    service = make_scripted(BOTH, "12 degrees at noon.")
    assert asyncio.run(agent(client_of(service), stream)) == "12 degrees at noon."
    first, second = service.prompts
    assert '"name": "get_weather", "description": "Now."' in first
    for told in (
        '<|assistant|>One moment.<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}',
        "<|tool|>12 degrees<|end|><|tool|>noon<|end|><|assistant|>",
    ):
        assert told in second


# Chats --------------------------------------------------------------------------------------------


def test_a_whole_message_with_calls():
    reply, service = ask(BOTH)
    message, reason = message_of(reply)
    assert (message["content"], reason) == ("One moment.", "tool_calls")
    assert [each["function"]["name"] for each in message["tool_calls"]] == [*RESULTS]
    assert {each["type"] for each in message["tool_calls"]} == {"function"}
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    assert "reasoning_content" not in message
    assert service.chats[0][1]["tools"] == TOOLS
    message, _ = message_of(ask(call("get_time"))[0])
    assert message["content"] is None


def test_streams_say_the_same_and_leak_no_marker():
    more = {"stream": True, "n": 2, "logprobs": True, "domino": {"blocks": True}}
    reply, service = ask(f"<think>Hm.</think>{BOTH}", template=TEMPLATE + "{# <think> #}", **more)
    chunks = events(reply)
    for chunk in chunks:
        told = ChatCompletionChunk.model_validate(chunk, strict=True)
        assert told.model_dump(exclude_unset=True) == chunk
    for index in range(2):
        message, reason = put_together(chunks, index)
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "One moment.")
        assert reason == "tool_calls"
        assert [(each["name"], each["arguments"]) for each in message["tool_calls"]] == [
            ("get_weather", KÖLN), ("get_time", KÖLN),
        ]  # fmt: skip
    # Both cover all that was written, call or not; each block comes once.
    scored = [
        each["token"]
        for chunk in chunks
        if chunk["choices"][0]["index"] == 0 and chunk["choices"][0]["logprobs"]
        for each in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert "".join(scored).startswith("<think>Hm.</think>One moment.\n<tool_call>")
    cycles = [chunk["domino"]["cycle"] for chunk in chunks if "domino" in chunk]
    assert len(cycles) == len(service.streams[0].outputs)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(stream):
    text = f"See {call('get_rich')} \n"
    reply, _ = ask(text, stream=stream)
    message, reason = put_together(events(reply)) if stream else message_of(reply)
    assert (message["content"], reason) == (text, "stop")


def test_a_call_that_is_cut_off():
    tokens = tiny.make_tokenizer()
    until = len(tokens(call("get_time")[:55])["input_ids"])
    message, reason = message_of(ask(call("get_time"), max_tokens=until)[0])
    (cut,) = message["tool_calls"]
    assert KÖLN.startswith(cut["function"]["arguments"])
    assert reason == "length"
    message, reason = message_of(ask(BOTH, stop="Köln")[0])
    assert (message["tool_calls"][0]["function"]["arguments"], reason) == ('{"city": "', "stop")


def test_one_call_ends_the_answer_if_no_more_are_wanted():
    reply, service = ask(BOTH + " and more", parallel_tool_calls=False)
    message, reason = message_of(reply)
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    written = service.tokenizer.decode(service.sequences[0].output)
    assert BOTH.startswith(written), "nothing is decoded after it"
    assert written.endswith(KÖLN)
    single = (
        TEMPLATE + '{# raise_exception("This model only supports single tool-calls at once!") #}'
    )
    assert len(message_of(ask(BOTH, template=single)[0])[0]["tool_calls"]) == 1


def grammar_of(**body):
    """Of a request; it is compiled, so that it is one."""
    reply, service = ask("x", **body)
    assert reply.status_code == 200, reply.text
    return service.sequences[0].params.grammar


def allows(grammar, text, special=()):
    """Whether the text as a whole matches."""
    service = make_scripted("x", special_tokens=special)
    matcher = service.grammars.compile(grammar).matcher()
    try:
        for token in service.tokenizer(text)["input_ids"]:
            matcher.commit(token)
        matcher.commit(service.tokenizer.eos_token_id)
    except InputError:
        return False
    return True


NAMED = {"type": "function", "function": {"name": "get_time"}}
MISTRAL = {"template": TEMPLATE + "{# [TOOL_CALLS] #}", "special": ("[TOOL_CALLS]",)}
BARE = {"config": {"tool_call_parser": "json"}}
LISTED = f'[TOOL_CALLS][{{"name": "get_time", "arguments": {KÖLN}}}]'


@pytest.mark.parametrize(("body", "right", "wrong"), [
    ({"tool_choice": "required"},
     [call("get_time"), f"{call('get_time')}\n{call('get_weather')}"],
     ["", "Hi.", call("get_rich"), call("get_time", '{"city": 1}'), call("get_time", "{}"),
      call("get_time") + " Done."]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [call("get_time")],
     [f"{call('get_time')}\n{call('get_weather')}"]),
    ({"tool_choice": NAMED}, [call("get_time")], [call("get_weather"), call("get_time") * 2]),
    ({"tool_choice": "required", **MISTRAL}, [LISTED, LISTED.replace("[{", " [{")], ["x", "[]"]),
    ({"tool_choice": "required", **BARE}, [LISTED[13:-1]], ["Hi."]),
    ({"tool_choice": "required", "template": TEMPLATE + "{# <think> #}"},
     [call("get_time"), f"<think>a < b</think>\n\n{call('get_time')}"],
     ["<think>Hm.</think>", "<think>" + call("get_time")]),
    ({"tool_choice": "required", "template": TEMPLATE + "<think>"},
     [f"Hm.</think>{call('get_time')}"], [call("get_time")]),
    ({"tool_choice": "required", "template": TEMPLATE + "<think>", "special": ("</think>",)},
     [f"Hm.</think>{call('get_time')}"], [call("get_time")]),
    ({"response_format": {"type": "json_object"}}, ["{}", call("get_time")],
     ["Hi.", call("get_time", "{}")]),
    ({"response_format": {"type": "json_object"}, "tools": None, "template": TEMPLATE + "<think>"},
     ["Hm.</think>\n{}"], ["{}"]),
    ({"structured_outputs": {"choice": ["a", 'b"']}, **BARE}, ["a", 'b"', LISTED[13:-1]], ["c"]),
    ({"structured_outputs": {"regex": "a/+\\n"}}, ["a//\n"], ["a"]),
])  # fmt: skip
def test_what_is_required_is_a_grammar(body, right, wrong):
    grammar, special = grammar_of(**body), body.get("special", ())
    assert [text for text in right if not allows(grammar, text, special)] == []
    assert [text for text in wrong if allows(grammar, text, special)] == []


def test_strict_functions_fit_wherever_they_are_called():
    tools = [{"type": "function", "function": {**FUNCTIONS[1], "strict": True}}]
    for how in ({}, BARE, MISTRAL):
        assert grammar_of(**how) is None
        grammar, special = grammar_of(tools=tools, **how), how.get("special", ())
        assert allows(grammar, "Hi there.", special)
    grammar = grammar_of(tools=tools)
    assert allows(grammar, f"Hi. {call('get_time')} Done.")
    assert not allows(grammar, f"Hi. {call('get_time', '{}')}")
    odd = {"type": "object", "properties": {"a": {"not": {}}}}
    function = {"name": "f", "parameters": odd}
    assert (
        error_of(
            ask("x", tools=[{"type": "function", "function": {**function, "strict": True}}])[0]
        )["param"]
        == "tools"
    )
    tools = [{"type": "function", "function": function}]
    assert ask("x", tools=tools, tool_choice="required")[0].status_code == 200


def test_grammars_that_do_not_go_together():
    error = error_of(ask("x", structured_outputs={"grammar": 'start: "a"'})[0])
    assert error["param"] == "structured_outputs.grammar"
    lark = {"structured_outputs": {"grammar": 'start: "a"'}, "tools": None}
    opened = error_of(ask("x", template=TEMPLATE + "<think>", **lark)[0])
    assert opened["param"] == error["param"]
    assert allows(grammar_of(template=TEMPLATE + "{# <think> #}", **lark), "a")
    error = error_of(ask("x", tool_choice="required", domino={"accept": "block"})[0])
    assert error["param"] == "domino.accept"
    _, service = ask("x", tool_choice="required")
    assert service.sequences[0].params.rule == "coupled"


def test_none_is_not_told_of_tools():
    reply, service = ask(call("get_time"), tool_choice="none")
    message, reason = message_of(reply)
    assert (message["content"], reason) == (call("get_time"), "stop")
    assert "get_time" not in service.prompts[0]


def test_markers_that_are_special_tokens_are_seen():
    how = {"template": TEMPLATE + "{# [TOOL_CALLS] #}", "special": ("[TOOL_CALLS]",)}
    text = f'Well.[TOOL_CALLS] [{{"name": "get_time", "arguments": {KÖLN}}}]'
    message, reason = message_of(ask(text, logprobs=True, **how)[0])
    assert (message["content"], reason) == ("Well.", "tool_calls")
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "get_time", "arguments": KÖLN}
    assert len(made["id"]) == 9
    message, _ = message_of(ask("Well.[TOOL_CALLS] no", **how)[0])
    assert message["content"] == "Well. no", "special tokens are no text"
    text = '<|python_tag|>{"name": "get_time", "parameters": {}}'
    how = {"config": {"tool_call_parser": "llama3_json"}, "special": ("<|python_tag|>",)}
    message, _ = message_of(ask(text, **how)[0])
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_other_fields_go_with_calls():
    how = {"template": TEMPLATE + "{# [TOOL_CALLS] #}", "special": ("[TOOL_CALLS]", "<|odd|>")}
    text = f'Well.<|odd|>[TOOL_CALLS] [{{"name": "get_time", "arguments": {KÖLN}}}]'
    reply, service = ask(
        f"{text} more", skip_special_tokens=False, parallel_tool_calls=False, logprobs=True, **how
    )
    message, reason = message_of(reply)
    assert (message["content"], reason) == ("Well.<|odd|>", "tool_calls")
    scored = reply.json()["choices"][0]["logprobs"]["content"]
    assert text.encode().startswith(b"".join(bytes(each["bytes"]) for each in scored))
    stop = {"stop": "Köln", "include_stop_str_in_output": True}
    (made,) = message_of(ask(BOTH, **stop)[0])[0]["tool_calls"]
    assert made["function"]["arguments"] == '{"city": "Köln'
    late = len(service.tokenizer(BOTH[: BOTH.index("Köln") + 4])["input_ids"])
    message, reason = message_of(ask(BOTH, stop="Köln", min_tokens=late)[0])
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [
        KÖLN, '{"city": "'
    ]  # fmt: skip


def test_tools_are_part_of_what_is_tokenised():
    reply, service = ask("x", tool_choice="auto")
    assert reply.status_code == 200
    client = Client(service)
    body = {"messages": HELLO, "tools": TOOLS}
    found = client.send("POST", "/tokenize", json=body).json()
    assert found["tokens"] == list(service.sequences[0].prompt)
    error = error_of(client.complete(tools=TOOLS))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")


def test_templates_that_know_no_tools():
    error = error_of(ask("x", template=tiny.TEMPLATE)[0])
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
    assert "chat template has no variable tools" in error["message"]
    assert "leave them out, or serve a model" in error["message"]
    error = error_of(ask("x", template="{{ tools }} <tool_call><function=f>")[0])
    assert "--tool-call-parser" in error["message"]
    error = error_of(ask("x", config={"tool_call_parser": "none"})[0])
    assert "--tool-call-parser none" in error["message"]
    error = error_of(ask("x", template=tiny.TEMPLATE, tools=[], messages=CALLED)[0])
    assert error["param"] == "messages"


DEEP = functools.reduce(lambda inner, _: {"not": inner}, range(70), {})
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ""}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
]  # fmt: skip


def test_messages_as_the_template_gets_them():
    _, service = ask("x", messages=CALLED)
    made = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": {}}}
    assert service.chats[0][0] == [
        HELLO[0],
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [made]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "get_time"},
    ]


def changed(**fields):
    """A message with a call that is wrong in one way."""
    function = {"name": "f", "arguments": "{}"}
    function |= {name: fields.pop(name) for name in ("name", "arguments") if name in fields}
    one = {"id": "c", "type": "function", "function": function, **fields}
    return {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [one]}]}


@pytest.mark.parametrize(("body", "param"), [
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "auto", "tools": None}, "tool_choice"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "c9"}]},
     "messages[1].tool_call_id"),
    ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "messages[1].content"),
    (changed(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
    (changed(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
    (changed(name="a b"), "messages[1].tool_calls[0].function.name"),
    (changed(arguments='{"a":' * 65 + "1" + "}" * 65),
     "messages[1].tool_calls[0].function.arguments"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
     "tools[0].function.parameters"),
    (changed(id=""), "messages[1].tool_calls[0].id"),
    (changed(id="x" * 129), "messages[1].tool_calls[0].id"),
])  # fmt: skip
def test_what_is_wrong_is_named(body, param):
    reply, _ = ask("x", **{"tools": TOOLS, **body})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


# Reasoning ----------------------------------------------------------------------------------------

THINKING = (
    TEMPLATE + "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize("special", [(), ("</think>",)])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_the_template_opens(stream, special):
    text = "I wonder.\n</think>\n\nYes."
    how = {"enable_thinking": True}
    options = {"include_usage": True}
    reply, service = ask(
        text, tools=None, template=THINKING, chat_template_kwargs=how, stream=stream,
        stream_options=options if stream else None, special=special,
    )  # fmt: skip
    if stream:
        *chunks, last = events(reply)
        message, reason = put_together(chunks)
        usage = last["usage"]
    else:
        (message, reason), usage = message_of(reply), reply.json()["usage"]
    assert (message["reasoning_content"], message["content"]) == ("I wonder.", "Yes.")
    assert reason == "stop"
    thought = len(service.tokenizer("I wonder.\n</think>")["input_ids"])
    assert usage["completion_tokens_details"]["reasoning_tokens"] == thought
    assert usage["completion_tokens"] > thought + 2


def test_reasoning_by_choice():
    text = "<think>Hm.</think>Yes."
    message, _ = message_of(ask(text, tools=None, template=THINKING)[0])
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    none = {"config": {"reasoning_parser": "none"}, "template": THINKING}
    reply, _ = ask(text, tools=None, **none)
    assert message_of(reply)[0]["content"] == text
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    message, _ = message_of(ask(text, tools=None)[0])
    assert message["content"] == text, "the template does not know reasoning"
    config = {"reasoning_parser": "think"}
    reply, _ = ask("Yes.", tools=None, config=config)
    assert message_of(reply)[0]["content"] == "Yes."
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    begun = [*HELLO, {"role": "assistant", "content": "<think>I"}]
    how = {"template": THINKING, "messages": begun, "continue_final_message": True}
    message, _ = message_of(ask("wonder.</think>Yes.", tools=None, **how)[0])
    assert (message["reasoning_content"], message["content"]) == ("wonder.", "Yes.")
    cut, reason = message_of(ask(text, tools=None, config=config, max_tokens=8)[0])
    assert (cut["content"], reason) == (None, "length")


# The Responses API --------------------------------------------------------------------------------


def respond(*texts, template=TEMPLATE, **body):
    service = make_scripted(*texts, template=template)
    body = {"model": MODEL, "input": "hello", **body}
    return Client(service).send("POST", "/v1/responses", json=body), service


def response_events(reply):
    assert reply.status_code == 200, reply.text
    found = []
    for event in reply.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        shape = ResponseEvent.model_validate(told, strict=True)
        assert shape.model_dump(exclude_unset=True) == told
        found.append(told)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def without_ids(output):
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_a_whole_response():
    reply, service = respond("Yes.", instructions="be brief", max_output_tokens=50, store=False)
    body = reply.json()
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
    (item,) = body["output"]
    text = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    assert (item["type"], item["role"], item["content"]) == ("message", "assistant", [text])
    assert service.prompts == ["<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"]
    assert service.sequences[0].params.max_new_tokens == 50
    chat = Client(make_scripted("Yes.")).chat(
        messages=[{"role": "system", "content": "be brief"}, *HELLO]
    ).json()  # fmt: skip
    usage, other = body["usage"], chat["usage"]
    assert usage["input_tokens"] == other["prompt_tokens"]
    assert usage["output_tokens"] == other["completion_tokens"]
    assert usage["output_tokens_details"] == other["completion_tokens_details"]


def test_a_streamed_response_says_the_same():
    text = f"<think>Hm.</think>{BOTH} Wait."
    template = TEMPLATE + "{# <think> #}"
    whole = respond(text, template=template, tools=FLAT)[0].json()
    told = response_events(respond(text, template=template, tools=FLAT, stream=True)[0])
    kinds = [event["type"].removeprefix("response.") for event in told]
    for kind in ("output_text.delta", "reasoning_text.delta", "function_call_arguments.delta"):
        assert kind in kinds
    steady = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    one = ["output_item.added", "content_part.added"]
    text = [*one, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    thought = [kind.replace("output_text", "reasoning_text") for kind in text]
    made = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    assert steady == [
        "created", "in_progress", *thought, *text, *made, *made, *text, "completed",
    ]  # fmt: skip
    last = told[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    own = {"output": 0, "id": 0, "created_at": 0}
    assert {**last, **own} == {**whole, **own}
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert [each["type"] for each in done] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "One moment. Wait."


def test_text_of_a_format():
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    reply, service = respond("{}", text={"format": schema, "verbosity": None})
    assert reply.json()["text"]["format"] == {"description": None, "strict": None, **schema}
    assert service.sequences[0].params.grammar.kind == "json_schema"
    assert respond("x")[0].json()["text"] == {"format": {"type": "text"}}


def test_a_response_that_is_cut_off_or_fails():
    body = respond("Yes, of course.", max_output_tokens=3)[0].json()
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    told = response_events(respond("Yes, of course.", max_output_tokens=3, stream=True)[0])
    assert told[-1]["type"] == "response.incomplete"
    service = make_scripted("Yes, of course.")
    service.fail = lambda _: RuntimeError("oh")
    body = {"model": MODEL, "input": "x", "stream": True}
    told = response_events(Client(service).send("POST", "/v1/responses", json=body))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert "oh" not in told[-1]["response"]["error"]["message"]
    assert respond("")[0].json()["output"][0]["content"][0]["text"] == ""


def test_items_become_the_messages_of_a_chat():
    said = {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}
    made = {"type": "function_call", "name": "get_time", "arguments": KÖLN}
    _, service = respond("x", input=[
        {"role": "developer", "content": "brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "m", "status": "completed", "role": "assistant",
         "content": [said]},
        {**made, "call_id": "1"}, {**made, "call_id": "2", "id": "fc"},
        {"type": "function_call_output", "call_id": "2", "output": "noon"},
        {"role": "assistant", "content": "It is noon."},
        {"role": "assistant", "content": "Really."},
    ])  # fmt: skip
    messages = service.chats[0][0]
    assert [each["role"] for each in messages] == [
        "system", "user", "assistant", "tool", "assistant", "assistant",
    ]  # fmt: skip
    turn = messages[2]
    assert (turn["content"], turn["reasoning_content"]) == ("Well.", "Hm.")
    assert [each["id"] for each in turn["tool_calls"]] == ["1", "2"]
    assert turn["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}
    assert messages[3]["name"] == "get_time"


def test_reasoning_without_text_is_no_message():
    """A client sends back what was cut off before it came to anything."""
    empty = {"type": "reasoning", "id": "rs", "summary": []}
    hello, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well."}
    for more in ({}, {"content": None}, {"content": []}):
        reply, service = respond("x", input=[hello, {**empty, **more}, hello])
        assert reply.status_code == 200
        assert service.chats[0][0] == [hello, hello]
    _, service = respond("x", input=[hello, empty, said])
    assert service.chats[0][0] == [hello, said]


@pytest.mark.parametrize(("body", "param", "code"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}}},
     "text", "invalid_value"),
    ({"domino": {"blocks": True}}, "domino.blocks", "unsupported_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [FLAT[0], FLAT[0]]}, "tools[1].name", "invalid_value"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content[0].type", "unsupported_parameter"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
     "input[0].call_id", "invalid_value"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "1"}]},
     "input[0].arguments", "invalid_value"),
    ({"max_output_tokens": 5000}, "input", "context_length_exceeded"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
])  # fmt: skip
def test_what_is_wrong_in_a_response_is_named(body, param, code):
    reply, _ = respond("x", **body)
    assert reply.status_code == 400
    assert (error_of(reply)["param"], error_of(reply)["code"]) == (param, code)


CHAT = {
    "messages": [*HELLO, {"role": "assistant", "content": None, "mood": 1, "tool_calls": [
        {"id": "c1", "type": "function", "colour": 2,
         "function": {"name": "get_time", "arguments": "", "tempo": 3}},
    ]}],
    "tools": [{"type": "function", "kind": 4, "function": {"name": "f", "size": 5}}],
    "tool_choice": {"type": "function", "fit": 6, "function": {"name": "f", "wet": 7}},
    "response_format": {"type": "json_schema", "odd": 8,
                        "json_schema": {"name": "a", "schema": {"type": "object"}, "even": 9}},
}  # fmt: skip
RESPONSE = {
    "colour": 1,
    "input": [
        {"role": "user", "mood": 2, "content": [{"type": "input_text", "text": "a", "tempo": 3}]}
    ],
    "tools": [{"type": "function", "name": "f", "size": 4}],
    "tool_choice": {"type": "function", "name": "f", "fit": 5},
    "text": {"odd": 6, "format": {"type": "json_schema", "name": "a", "schema": {}, "even": 7}},
}


@pytest.mark.parametrize(("path", "body", "ignored", "refused"), [
    ("/v1/chat/completions", CHAT,
     {"messages.mood", "messages.tool_calls.colour", "messages.tool_calls.function.tempo",
      "tools.kind", "tools.function.size", "tool_choice.fit", "tool_choice.function.wet",
      "response_format.odd", "response_format.json_schema.even"},
     "response_format.json_schema.even"),
    ("/v1/responses", RESPONSE,
     {"colour", "input.mood", "input.content.tempo", "tools.size", "tool_choice.fit", "text.odd",
      "text.format.even"}, "input[0].content[0].tempo"),
])  # fmt: skip
def test_unknown_fields_are_ignored_or_refused_everywhere(path, body, ignored, refused):
    def post(**config):
        given = {"model": MODEL, **body}
        return Client(make_scripted("x", **config)).send("POST", path, json=given)

    reply = post()
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-domino-ignored-fields"].split(", ")) == ignored
    error = error_of(post(strict=True))
    assert (error["code"], error["param"]) == ("unknown_parameter", refused)


def test_the_clients_own_helpers():
    async def ask():
        client = client_of(make_scripted("Yes.", template=tiny.TEMPLATE))
        reply = await client.responses.create(model=MODEL, input="hello")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="x", tools=FLAT)
        return reply.output_text, refused.value.param

    assert asyncio.run(ask()) == ("Yes.", "tools")


# A real engine ------------------------------------------------------------------------------------


def forced(tokenizer, text):
    """Leaves the text's tokens, one after the other, and then the end."""
    said = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def hook(prompt, output, logits):
        logits[:] = -100.0
        logits[said[min(len(output), len(said) - 1)]] = 0.0
        return logits

    return hook


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A server with a drafter, whose model says what `engine.said` is."""
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = tiny.make_tokenizer()
    names = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ tools | tojson }}", names
    )  # the context is small
    target = tiny.save_target(folder / "target", tokenizer=tokenizer)
    decoder = DominoDecoder.from_pretrained(target, tiny.save_draft(folder / "draft"), depth=3)
    real = ChatCompletionRequest.to_sampling_params

    def to_params(request, *given):
        params = real(request, *given)
        if not server.said:
            return params
        return replace(params, hooks=(forced(tokenizer, server.said.pop(0)),), accept="coupled")

    with pytest.MonkeyPatch.context() as patch, live(decoder, context=256, page=False) as server:
        patch.setattr(ChatCompletionRequest, "to_sampling_params", to_params)
        yield server


def test_a_real_engine_calls_once_and_answers(engine):
    engine.said = [call("f", "{}") * 2, "Done."]
    tools = [{"type": "function", "name": "f", "strict": None}]
    client = openai.OpenAI(base_url=f"{engine.address}/v1", api_key="none", max_retries=0)
    how = {"model": MODEL, "tools": tools, "parallel_tool_calls": False}

    def ask(items):
        return [*client.responses.create(input=items, stream=True, **how)][-1].response

    first = ask("go")
    (made,) = first.output
    assert (made.name, made.arguments) == ("f", "{}")
    tokens = len(tiny.make_tokenizer()(call("f", "{}"))["input_ids"])
    assert first.usage.output_tokens < tokens, "it ends with the arguments"
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "4"}
    items = [{"role": "user", "content": "go"}, made.to_dict(), result]
    assert ask(items).output_text == "Done."


def test_a_random_model_calls_what_is_required(engine):
    engine.said = []
    units = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"],
             "additionalProperties": False}  # fmt: skip
    names = ["f", "get_time"]
    tools = [
        {"type": "function", "name": name, "parameters": units, "strict": False} for name in names
    ]
    client = openai.OpenAI(base_url=f"{engine.address}/v1", api_key="none", max_retries=0)
    reply = client.responses.create(
        model=MODEL, input="go", tools=tools, parallel_tool_calls=False, max_output_tokens=150,
        tool_choice="required",
        extra_body={"seed": 3},
    )  # fmt: skip
    (made,) = reply.output
    assert made.name in names
    assert json.loads(made.arguments)["unit"] in ("c", "f")
