"""Every refusal has the shape of OpenAI's errors, the right status, and names what is wrong."""

import asyncio
import json

import pytest

from domino_spec.errors import InputError
from domino_spec.serving import middleware
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.errors import DecodingError, QueueFullError, ShuttingDownError
from tests.serving.conftest import HELLO, error_of, events
from tests.serving.fake import MODEL

UNSUPPORTED = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "mp3"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "store": True,
    "service_tier": "priority",
}
HARMLESS = {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "logit_bias": {},
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
}
WRONG = {
    "temperature": [2.1, -0.1, "1", True],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 2],
    "n": [0, 1000, 1.5, "2"],
    "seed": [1.5, 2**63, 10**400],
    "max_tokens": [0, -1, "many"],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, 1e-9],
    "stop": [["a"] * 17, "", [""], [1], {}],
    "stream": ["yes", 1],
    "user": [1],
    "metadata": [{"a": 1}, {str(i): "x" for i in range(17)}],
    "domino": [{"blocks": 1}, 5],
    "stream_options": [{"include_usage": "yes"}],
    "chat_template_kwargs": ["x"],
    "logit_bias": [
        {"5": 101},
        {"five": 1},
        {"-5": 1},
        {"5": "1"},
        {str(i): 0 for i in range(1025)},
    ],
    "min_tokens": [-1, 1.5],
    "stop_token_ids": [[-1], ["a"], 5, [0] * 1025],
    "prompt_logprobs": [-1, 21],
    "top_logprobs": [21, 3],
    "response_format": [
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    ],
    "structured_outputs": [{}, {"choice": []}, {"json": "{"}],
    "guided_json": ["[1]", 3],
    "guided_regex": ["(?=a)", ""],
    "guided_grammar": ["start: ("],
    "guided_choice": [["a", ""]],
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_done_is_refused_by_name(client, name):
    response = client.chat(**{name: UNSUPPORTED[name]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "unsupported_parameter"
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0].split("[")[0] == name
    assert error["message"].startswith(name)


@pytest.mark.parametrize("value", [{"suffix": "end"}, {"best_of": 2}, {"n": 2, "best_of": 1}])
def test_what_completions_do_not_do(client, value):
    response = client.complete(**value)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("unsupported_parameter", [*value][-1])


def test_what_changes_nothing_is_taken(client):
    assert client.chat(**HARMLESS).status_code == 200
    assert client.chat(**dict.fromkeys(UNSUPPORTED)).status_code == 200
    assert client.complete(echo=False, suffix=None, best_of=1, logit_bias={}).status_code == 200


@pytest.mark.parametrize("name", WRONG)
def test_values_that_make_no_sense(client, name):
    for value in WRONG[name]:
        response = client.chat(**{name: value})
        assert response.status_code == 400, (name, value)
        error = error_of(response)
        assert error["param"].split(".")[0].split("[")[0] == name, (value, error)
        assert error["code"] == "invalid_value"
    assert not client.service.sequences


@pytest.mark.parametrize("kind", ["input_image", "input_audio", "file", "video_url"])
def test_what_is_not_text_is_refused_by_name(client, kind):
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "x"}}]
    error = error_of(client.chat(messages=[{"role": "user", "content": content}]))
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages[0].content[1].type"
    assert "parts of this type are not supported; give text" in error["message"]


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "function", "content": "4"}, "messages[1].role", "invalid_value"),
        ({"content": "4"}, "messages[1].role", "missing_required_parameter"),
        ({"role": "wizard", "content": "4"}, "messages[1].role", "invalid_value"),
        ({"role": "user"}, "messages[1].content", "missing_required_parameter"),
        ({"role": "user", "content": None}, "messages[1].content", "invalid_value"),
        ({"role": "user", "content": []}, "messages[1].content", "invalid_value"),
        ("hello", "messages[1]", "invalid_value"),
    ],
)  # fmt: skip
def test_messages_that_are_none(client, message, param, code):
    response = client.chat(messages=[*HELLO, message])
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("chat", {"stop": ["a"] * 17}, "stop: has 17 entries; expected at most 16."),
        ("chat", {"stop": 3}, "stop: expected a string or a list; found 3."),
        ("chat", {"stop": [3]}, "stop[0]: expected a string; found 3."),
        ("complete", {"prompt": []}, "prompt: has 0 entries; expected at least 1."),
        ("complete", {"prompt": [[]]}, "prompt[0]: has 0 entries; expected at least 1."),
        ("complete", {"prompt": None}, "prompt: expected a string or a list; found null."),
        ("complete", {"prompt": [-1]},
         "prompt[0]: should be greater than or equal to 0; found -1."),
        ("complete", {"prompt": [True]},
         "prompt[0]: expected a string or an integer or a list; found true."),
        ("chat", {"n": 129},
         "129 choices are requested; this server gives at most 16 to one request."),
        ("chat", {"temperature": 3}, "temperature: should be less than or equal to 2; found 3."),
        ("chat", {"messages": [*HELLO, "hi"]}, "messages[1]: expected an object; found 'hi'."),
        ("chat", {"messages": [{"role": "assistant", "content": None}]},
         "messages[0].content: is null in a message without tool_calls; expected text."),
        ("chat", {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
         "messages: the model's chat template knows neither tool_calls nor the role tool; leave "
         "such messages out, or serve a model whose template knows them."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(client, kind, body, message):
    assert error_of(getattr(client, kind)(**body))["message"] == message


def test_more_choices_than_the_queue_holds_is_about_n(make_client):
    client = make_client(refuse=InputError("3 sequences are requested at once."))
    assert error_of(client.chat(n=3))["param"] == "n"
    assert error_of(client.complete(n=3))["param"] == "n"
    assert error_of(client.complete(prompt=["a", "b"]))["param"] == "prompt"


def test_missing_parameters(client):
    for body, missing in (({"model": MODEL}, "messages"), ({"messages": HELLO}, "model")):
        error = error_of(client.send("POST", "/v1/chat/completions", json=body))
        assert (error["code"], error["param"]) == ("missing_required_parameter", missing)


def test_another_model(client):
    for response in (client.chat(model="gpt-4o"), client.get("/v1/models/gpt-4o")):
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert MODEL in error["message"]


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit(client, kind, stream):
    response = getattr(client, kind)(max_tokens=1000, stream=stream)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == {"chat": "messages", "complete": "prompt"}[kind]


def test_a_template_that_refuses(client):
    client.service.tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    response = client.chat()
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages"
    assert "no users here" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "later"),
    [
        (QueueFullError("full", retry_after=2.2), 429, "rate_limit_exceeded", "3"),
        (ShuttingDownError("going", retry_after=4.2), 503, "server_stopping", "5"),
        (ShuttingDownError("broken"), 503, "server_stopping", None),
        (InputError("no such token"), 400, "invalid_value", None),
        (RuntimeError("secret: /home/me"), 500, "internal_error", None),
    ],
)
def test_a_service_that_refuses(make_client, failure, status, code, later, stream):
    for how in ({"refuse": failure}, {"fail_at_once": failure}):
        response = make_client(**how).chat(stream=stream)
        assert response.status_code == status
        assert response.headers.get("retry-after") == later
        error = error_of(response)
        assert error["code"] == code
        assert "secret" not in error["message"]
        if status == 500:
            assert response.headers["x-request-id"] in error["message"]


def test_an_answer_that_fails_in_a_stream_says_so_in_it(make_client):
    failing = make_client(fail=lambda choice: DecodingError("secret") if choice == 1 else None)
    *chunks, last = events(failing.chat(stream=True, n=2))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in last["error"]["message"]
    assert failing.service.streams[0].cancelled


def test_an_answer_that_fails_is_no_answer(make_client):
    failing = make_client(fail=lambda choice: DecodingError("x") if choice == 1 else None)
    assert failing.chat(n=2).status_code == 500
    assert failing.service.streams[0].cancelled


def test_paths_and_methods_that_are_not_there(client):
    for path in ("/v1/nothing", "/v1/chat/completions/", "/docs", "/v1/embeddings"):
        response = client.get(path)
        assert response.status_code == 404
        assert error_of(response)["code"] == "not_found"
    response = client.get("/v1/chat/completions")
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_a_bug_of_ours_says_where_to_look_and_nothing_more(client, caplog):
    client.service.encode_chat = None
    response = client.chat()
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "NoneType" not in error["message"]
    assert response.headers["x-request-id"] in error["message"]
    assert response.headers["x-request-id"] in caplog.text
    assert "NoneType" in caplog.text


# Bodies: never a 500 ------------------------------------------------------------------------------


GOOD = json.dumps({"model": MODEL, "messages": HELLO}).encode()
DEEP = 100_000
SAID = b'{"model":"tiny","messages":[{"role":"user","content":"%s"}]}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"{",
        b'{"model": }',
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b'{"model":"\xff"}',
        b"[" * DEEP + b"]" * DEEP,
        b'{"model":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        GOOD[:-1] + b',"temperature":NaN}',
        GOOD[:-1] + b',"temperature":Infinity}',
        GOOD[:-1] + b',"temperature":1e999}',
        GOOD[:-1] + b',"seed":' + b"9" * 10_000 + b"}",
        GOOD[:-1] + b',"stop":"\\ud800"}',
        SAID % b"\\ud800",
        GOOD + b"{}",
        json.dumps({str(i): i for i in range(200)}).encode(),
        b'{"model":"tiny","messages":' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"model":"tiny","messages":[' + b"1," * 50_000 + b"1]}",
    ],
)  # fmt: skip
def test_no_body_is_too_odd_for_a_plain_refusal(client, body):
    response = client.raw(body)
    assert response.status_code == 400, response.text
    error_of(response)
    assert not client.service.sequences


@pytest.mark.parametrize("text", [rb"\u0000", rb"\ud83d\ude00", rb"\u202e", "→".encode(), rb"\\"])
def test_odd_text_is_text(client, text):
    assert client.raw(SAID % text).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x"])
def test_other_content_types_are_refused(client, kind):
    """What a page of another site can send without being asked never gets in."""
    response = client.raw(GOOD, kind=kind)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"
    response = client.send("POST", "/v1/chat/completions", content=GOOD)
    assert response.status_code == 415


@pytest.mark.parametrize(
    ("where", "param"),
    [
        (lambda many: {"metadata": many}, "metadata"),
        (lambda many: {"messages": [{**HELLO[0], **many}]}, "messages[0]"),
        (lambda many: {"domino": many}, "domino"),
    ],
)
def test_an_object_of_very_many_fields_is_one_error(client, where, param):
    error = error_of(client.chat(**where({str(number): 0 for number in range(101)})))
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "more than 100 fields" in error["message"]


def test_the_way_that_got_furthest_is_the_one_that_was_meant(client):
    assert error_of(client.complete(prompt=[1, 2, 3, "a"]))["param"] == "prompt[3]"
    assert error_of(client.complete(prompt=["a", "b", 3]))["param"] == "prompt[2]"
    assert error_of(client.complete(prompt=[[1], [2, -1]]))["param"] == "prompt[1][1]"


def test_a_charset_does_no_harm(client):
    assert client.raw(GOOD, kind="application/json; charset=utf-8").status_code == 200


def padded(size: int) -> bytes:
    body = {"model": MODEL, "messages": HELLO, "user": ""}
    short = len(json.dumps(body).encode())
    return json.dumps({**body, "user": "x" * (size - short)}).encode()


def test_bodies_end_somewhere(make_client):
    client = make_client(config=ServerConfig(model=MODEL, page=False, max_body_bytes=2048))
    assert client.raw(padded(2048)).status_code == 200
    response = client.raw(padded(2049))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


def test_a_body_that_does_not_say_its_length_ends_too(make_client):
    client = make_client(config=ServerConfig(model=MODEL, page=False, max_body_bytes=2048))
    sent = 0

    def send(body: bytes):
        async def pieces():
            nonlocal sent
            for start in range(0, len(body), 256):
                sent += 1
                yield body[start : start + 256]

        return client.send(
            "POST",
            "/v1/chat/completions",
            content=pieces(),
            headers={"content-type": "application/json"},
        )

    assert send(padded(2048)).status_code == 200
    sent = 0
    response = send(padded(100_000))
    assert response.status_code == 413
    error_of(response)
    assert sent < 12, "it was read to the end"


def sent_slowly(client, *parts: bytes) -> list[dict]:
    """Send these and nothing more, over a connection that stays open; what came back."""
    coming = list(parts)
    sent: list[dict] = []

    async def receive():
        if not coming:
            await asyncio.Event().wait()
        part = coming.pop(0)
        return {"type": "http.request", "body": part, "more_body": part != GOOD}

    async def send(message):
        sent.append(message)

    path = "/v1/chat/completions"
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "asgi": {"version": "3.0"},
    }  # fmt: skip
    asyncio.run(client.app(scope, receive, send))
    return sent


@pytest.mark.parametrize("parts", [(), (b"{",), (b"{", b'"mod')])
def test_a_body_that_never_ends_is_not_waited_for(client, monkeypatch, parts):
    monkeypatch.setattr(middleware, "UPLOAD_SECONDS", 0)
    start, body = sent_slowly(client, *parts)
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"
    assert not client.service.sequences


def test_an_answer_may_take_longer_than_its_body(client, monkeypatch):
    monkeypatch.setattr(middleware, "UPLOAD_SECONDS", 0)
    start, _ = sent_slowly(client, GOOD)
    assert start["status"] == 200
