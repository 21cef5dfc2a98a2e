"""What clients of OpenAI's and vLLM's servers send beyond the basics."""

import math

import pytest

from domino_spec.serving.config import ServerConfig
from domino_spec.serving.protocol import ChatCompletionResponse, CompletionResponse
from tests.cli import tiny
from tests.serving.conftest import HELLO, error_of, events
from tests.serving.fake import MODEL, OTHER

THREE_QUARTERS, EIGHTH = math.log(0.75), math.log(0.125)
USER = tiny.SPECIALS.index("<|user|>")


def make(make_client, **settings):
    return make_client(config=ServerConfig(model=MODEL, page=False, **settings))


# Sampling -----------------------------------------------------------------------------------------


def test_sampling_fields_reach_the_engine(client):
    given = {
        "logit_bias": {"50": -100, "7": 2.5}, "min_tokens": 3, "stop_token_ids": [9, 8, 9],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "max_tokens": 5,
    }  # fmt: skip
    for ask in (client.chat, client.complete):
        assert ask(**given).status_code == 200
        params = client.service.sequences[-1].params
        assert dict(params.logit_bias) == {7: 2.5, 50: -100.0}
        assert (params.min_tokens, params.stop_token_ids) == (3, (9, 8))
        assert params.include_stop_str_in_output
        assert not params.skip_special_tokens
        assert client.service.sequences[-1].end_ids == {0, 9, 8}
    assert error_of(client.chat(min_tokens=6, max_tokens=5))["param"] == "min_tokens"
    assert error_of(client.complete(max_tokens=None, min_tokens=17))["param"] == "min_tokens"


def test_what_ended_a_text_is_shown_where_that_is_asked_for(make_client):
    tokens = [*tiny.make_tokenizer()("the fox")["input_ids"], USER, 0]
    client = make_client(tokens=tokens)

    def text(**how):
        return client.complete(**how).json()["choices"][0]["text"]

    assert text() == text(include_stop_str_in_output=True) == "the fox"
    assert text(skip_special_tokens=False) == "the fox<|user|>"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text(**shown) == "the fox<|user|><|end|>"
    assert text(stop=" f") == "the"
    assert text(stop=" f", include_stop_str_in_output=True) == "the f"
    (choice,) = client.complete(**shown, logprobs=0).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


# Prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["the dog", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(client, prompt, stream):
    ids = client.service.tokenizer("the dog")["input_ids"]
    prompt = ids if prompt == "ids" else prompt
    reply = client.complete(prompt=[prompt] * 2, echo=True, stream=stream)
    texts = ["", ""]
    for chunk in events(reply) if stream else [reply.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            assert choice["logprobs"] is None
    assert texts == ["the dogthe quick brown fox"] * 2
    assert client.service.sequences[0].params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_every_token_of_prompt_and_answer(client, stream):
    """The end token too: clients count the tokens from either end."""
    reply = client.complete(prompt="the dog", echo=True, logprobs=2, stream=stream)
    found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in events(reply) if stream else [CompletionResponse(**reply.json()).model_dump()]:
        (choice,) = chunk["choices"]
        text += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            found[name] += values
    (sequence,) = client.service.sequences
    answer = len(client.service.tokenizer("the quick brown fox")["input_ids"]) + 1
    assert "".join(found["tokens"]) == "the dogthe quick brown fox<|end|>"
    assert {len(values) for values in found.values()} == {len(sequence.prompt) + answer}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(
        [THREE_QUARTERS] * (len(found["tokens"]) - 1)
    )
    for token, start, top in zip(
        found["tokens"][1:-1], found["text_offset"][1:-1], found["top_logprobs"][1:-1], strict=True
    ):
        assert text[start:].startswith(token)
        assert top[token] == pytest.approx(THREE_QUARTERS)
        assert len(top) == 2


def test_a_prompt_can_be_scored_without_an_answer(client):
    """As OpenAI's completions were used to score texts."""
    reply = client.complete(prompt=["the dog", "fox"], echo=True, logprobs=1, max_tokens=0).json()
    assert [choice["text"] for choice in reply["choices"]] == ["the dog", "fox"]
    for choice, sequence in zip(reply["choices"], client.service.sequences, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(sequence.prompt)
        assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert client.complete(max_tokens=0).json()["choices"][0]["text"] == ""


def test_prompt_logprobs_are_told_by_token_id(client):
    chat = client.chat(prompt_logprobs=2, n=2)
    ChatCompletionResponse(**chat.json())
    whole = client.complete(prompt_logprobs=2, n=2).json()
    CompletionResponse(**whole)
    told = [chat.json()["prompt_logprobs"], *(each["prompt_logprobs"] for each in whole["choices"])]
    prompts = [sequence.prompt for sequence in client.service.sequences]
    for prompt, scores in zip(prompts[1:], told, strict=True):
        assert scores[0] is None
        for token, each in zip(prompt[1:], scores[1:], strict=True):
            assert list(each) == [str(token), str(OTHER)]
            assert each[str(token)]["logprob"] == pytest.approx(THREE_QUARTERS)
            assert each[str(token)]["rank"] == 1
            assert each[str(OTHER)]["logprob"] == pytest.approx(EIGHTH)
            assert each[str(OTHER)]["rank"] == 2
            assert each[str(OTHER)]["decoded_token"] == client.service.tokenizer.decode([OTHER])
    wanted = [sequence.params.prompt_logprobs for sequence in client.service.sequences]
    assert wanted == [2, None] * 2, "a prompt is scored once, however many choices it has"
    assert "prompt_logprobs" not in client.chat().json()
    error = error_of(client.chat(prompt_logprobs=1, stream=True))
    assert error["param"] == "prompt_logprobs"


def test_usage_comes_with_every_chunk_that_wants_it(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.complete(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert chunks[-1]["choices"] == []


# Templates ----------------------------------------------------------------------------------------


def test_a_final_message_is_gone_on_with(client):
    def prompt(**how):
        client.chat(**how)
        return client.service.tokenizer.decode(client.service.sequences[-1].prompt)

    said = [*HELLO, {"role": "assistant", "content": "the quick"}]
    begun = "<|user|>hello<|end|><|assistant|>"
    assert prompt() == begun
    assert prompt(add_generation_prompt=False) == "<|user|>hello<|end|>"
    assert prompt(messages=said, continue_final_message=True) == begun + "the quick"
    both = client.chat(continue_final_message=True, add_generation_prompt=True)
    assert error_of(both)["param"] == "add_generation_prompt"


def test_the_tokenizers_own_special_tokens(make_client):
    client = make_client()
    special = client.service.tokenizer
    from tokenizers.processors import TemplateProcessing

    special.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", 3)]
    )
    client.complete(prompt="fox")
    client.complete(prompt="fox", add_special_tokens=False)
    client.chat()
    client.chat(add_special_tokens=True)
    first, second, third, fourth = (sequence.prompt for sequence in client.service.sequences)
    assert first == [3, *second]
    assert fourth == [3, *third]


# Other endpoints ----------------------------------------------------------------------------------


def test_text_and_chats_are_tokenised_and_back(client):
    def post(path, **body):
        return client.send("POST", path, json=body)

    ids = client.service.tokenizer("the fox")["input_ids"]
    found = post("/tokenize", prompt="the fox", model=MODEL).json()
    assert found == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    names = client.service.tokenizer.convert_ids_to_tokens(ids)
    named = post("/tokenize", prompt="the fox", return_token_strs=True).json()
    assert named["token_strs"] == names
    chat = post("/tokenize", messages=HELLO, add_generation_prompt=False).json()
    assert post("/detokenize", tokens=chat["tokens"]).json() == {"prompt": "<|user|>hello<|end|>"}
    assert post("/tokenize", prompt="").json()["count"] == 0
    for body in ({}, {"prompt": "a", "messages": HELLO}):
        assert error_of(post("/tokenize", **body))["param"] == "prompt"
    assert error_of(post("/tokenize", prompt="a", model="other"))["code"] == "model_not_found"
    assert error_of(post("/detokenize", tokens=[1, -1]))["param"] == "tokens[1]"
    told = client.get("/tokenizer_info").json()
    assert (told["eos_token"], told["bos_token"]) == ("<|end|>", None)
    assert told["chat_template"] == tiny.TEMPLATE


def test_small_questions(make_client):
    client = make(make_client, api_keys=("a key",))
    for path in ("/health", "/ping"):
        assert client.get(path).json() == {"status": "ready"}
        assert client.send("HEAD", path).status_code == 200
    assert client.send("POST", "/ping").status_code == 200
    key = {"authorization": "Bearer a key"}
    assert set(client.get("/version", headers=key).json()) == {"version"}
    (model,) = client.get("/v1/models", headers=key).json()["data"]
    assert model["max_model_len"] == client.service.limits.context
    client.service.state = "stopping"
    assert client.get("/ping").status_code == 503


# Unknown fields -----------------------------------------------------------------------------------

UNKNOWN = {
    "colour": 1,
    "bad\r\nname: x": 2,
    "messages": [{**HELLO[0], "mood": "fine"}],
    "stream_options": {"include_usage": True, "tempo": 3},
    "stream": True,
}


def test_unknown_fields_are_ignored_and_named(client):
    response = client.chat(**UNKNOWN)
    assert response.status_code == 200
    names = response.headers["x-domino-ignored-fields"].split(", ")
    assert sorted(names) == ["bad??name??x", "colour", "messages.mood", "stream_options.tempo"]
    many = client.chat(**{f"{number:03}{'x' * 90}": 0 for number in range(90)})
    assert many.status_code == 200
    assert len(many.headers["x-domino-ignored-fields"]) < 1100
    assert many.headers["x-domino-ignored-fields"].endswith(", ...")
    assert "x-domino-ignored-fields" not in client.chat().headers
    assert error_of(client.chat(domino={"acept": "block"}))["code"] == "unknown_parameter"


def test_a_strict_server_refuses_them(make_client):
    client = make(make_client, strict=True)
    for name, path in (
        ("colour", "colour"), ("messages", "messages[0].mood"),
        ("stream_options", "stream_options.tempo"),
    ):  # fmt: skip
        error = error_of(client.chat(**{"stream": True, name: UNKNOWN[name]}))
        assert (error["code"], error["param"]) == ("unknown_parameter", path)


@pytest.mark.parametrize("strict", [True, False])
def test_what_changes_nothing_passes_and_what_is_not_done_is_refused(make_client, strict):
    client = make(make_client, strict=strict)
    nothing = {
        "use_beam_search": False, "length_penalty": 1, "bad_words": [], "priority": 0,
        "allowed_token_ids": None, "return_token_ids": False, "include_reasoning": True,
        "spaces_between_special_tokens": True, "documents": [], "request_id": "mine",
        "top_logprobs": 0, "logit_bias": {}, "min_tokens": 0, "stop_token_ids": [], "echo": False,
    }  # fmt: skip
    response = client.chat(**nothing)
    assert response.status_code == 200, response.text
    assert "x-domino-ignored-fields" not in response.headers
    for name, value in (
        ("use_beam_search", True), ("priority", 5), ("bad_words", ["x"]), ("echo", True),
        ("truncate_prompt_tokens", 5), ("chat_template", "{{ 1 }}"), ("suffix", "x"),
    ):  # fmt: skip
        error = error_of(client.chat(**{name: value}))
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)


# Pages of other sites -----------------------------------------------------------------------------

SITE = "https://chat.example"
ASKING = {
    "origin": SITE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


@pytest.mark.parametrize("allowed", [(SITE, "http://localhost:3000"), ("*",)])
def test_pages_of_allowed_sites_may_ask(make_client, allowed):
    client = make(make_client, allowed_origins=allowed, api_keys=("a key",))
    may = client.send("OPTIONS", "/v1/chat/completions", headers=ASKING)
    assert may.status_code == 204
    assert may.content == b""
    origin = "*" if "*" in allowed else SITE
    assert may.headers["access-control-allow-origin"] == origin
    assert "POST" in may.headers["access-control-allow-methods"]
    headers = may.headers["access-control-allow-headers"]
    assert headers == ASKING["access-control-request-headers"]
    for key, status in (("a key", 200), ("none", 401)):
        given = {"origin": SITE, "authorization": f"Bearer {key}"}
        response = client.get("/v1/models", headers=given)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_those_of_others_may_not(make_client):
    client = make(make_client, allowed_origins=(SITE,))
    for origin in ("https://evil.example", f"{SITE}.evil", "http://chat.example", "null"):
        asking = {**ASKING, "origin": origin}
        refused = client.send("OPTIONS", "/v1/chat/completions", headers=asking)
        assert refused.status_code == 405
        for response in (refused, client.get("/v1/models", headers={"origin": origin})):
            assert not [name for name in response.headers if name.startswith("access-control")]
            assert response.headers["vary"] == "Origin"
    asking = {**ASKING, "host": "evil.example"}
    assert client.send("OPTIONS", "/v1/models", headers=asking).status_code == 403
