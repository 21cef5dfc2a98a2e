"""Structured outputs over HTTP: valid, the same with drafts and without, and hostile ones."""

import asyncio
import json
import re
import sys
import time

import aiohttp
import jsonschema
import pytest
import transformers as tf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from domino_spec.api import DominoDecoder
from domino_spec.decoding import Grammar
from domino_spec.errors import InputError
from domino_spec.grammars import sandbox
from tests.serving.live import live
from tests.support.families import VOCAB, make_target, random_drafter

END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def json_tokenizer():
    """Byte-level, with all that JSON needs; fewer tokens than the model has rows."""
    letters = '{}[]":,-.0123456789abcdefghijklmnopqrstuvwxyzĠ'
    words = ["<pad>", "<bos>", "<end>", *letters, '{"', '":', '",', "re", "red", "bl", "ue"]
    merges = [("{", '"'), ('"', ":"), ('"', ","), ("r", "e"), ("re", "d"), ("b", "l"), ("u", "e")]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    assert len(words) < VOCAB
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture(scope="module")
def server():
    decoder = DominoDecoder(make_target("llama"), random_drafter(), json_tokenizer(), depth=3)
    with live(decoder, slots=4, context=192) as server:
        yield server


def ask(server, *bodies):
    """Responses to completions that are asked for at the same time."""

    async def post(session, body):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 100, "temperature": 0, **body}
        async with session.post(f"{server.address}/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def ask_all():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(post(session, body) for body in bodies))

    return asyncio.run(ask_all())


def text_of(response):
    status, body = response
    assert status == 200, body
    return body["choices"][0]["text"]


@pytest.mark.parametrize("common", [{}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
def test_json_is_valid_and_the_same_with_drafts_and_without(server, common):
    prompts = [[5 + 3 * index, 9, 30 + index] for index in range(4)]
    asked = [{"prompt": prompt, "response_format": FORMAT, **common} for prompt in prompts]
    plain = [{**each, "domino": {"speculate": False}} for each in asked]
    free = [{"prompt": prompt, "max_tokens": 8, **common} for prompt in prompts]
    found = ask(server, *asked, *plain, *free)
    texts = [text_of(each) for each in found[:8]]
    assert texts[:4] == texts[4:]
    assert len(set(texts)) > 1
    for (_, body), text in zip(found, texts, strict=False):
        assert body["choices"][0]["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    for each in found[8:]:
        text_of(each)


@pytest.mark.parametrize(("given", "matches"), [
    ({"response_format": {"type": "json_object"}, "max_tokens": 12}, r"\{.*"),
    ({"structured_outputs": {"json": SCHEMA}}, r"\{.*\}"),
    ({"guided_json": json.dumps(SCHEMA)}, r"\{.*\}"),
    ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}, "[a-c]{3}-[0-9]{2}"),
    ({"guided_regex": "[x-z]{4}"}, "[x-z]{4}"),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    ({"guided_choice": ["blue"]}, "blue"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"{2,4} "c"'}}, "ab{2,4}c"),
    ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ({"structured_outputs": {"json_object": True}, "max_tokens": 12}, r"\{.*"),
])  # fmt: skip
def test_every_spelling(server, given, matches):
    ((status, body),) = ask(server, given)
    assert status == 200, body
    assert re.fullmatch(matches, body["choices"][0]["text"], flags=re.DOTALL)


def test_chats_choices_penalties_and_logprobs_with_a_grammar(server):
    with pytest.MonkeyPatch.context() as patch:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        patch.setattr(server.service.tokenizer, "chat_template", template)

        async def chat():
            body = {
                "model": "tiny", "messages": [{"role": "user", "content": "red"}], "n": 3,
                "response_format": FORMAT, "frequency_penalty": 1, "top_p": 0.8, "logprobs": True,
                "max_tokens": 100,
            }  # fmt: skip
            async with aiohttp.ClientSession() as session:
                url = f"{server.address}/v1/chat/completions"
                async with session.post(url, json=body) as response:
                    return await response.json()

        for choice in asyncio.run(chat())["choices"]:
            content = choice["message"]["content"]
            jsonschema.validate(json.loads(content), SCHEMA)
            assert "".join(each["token"] for each in choice["logprobs"]["content"]) == content


HOSTILE = {
    "takes minutes": {"guided_json": {"type": "integer", "multipleOf": 9999991}},
    "overflows the stack": {"guided_grammar": "start: " + "(" * 60000 + '"a"' + ")" * 60000},
    "is nested too deep": {"guided_json": "[" * 500 + "]" * 500},
    "is too large": {"guided_regex": "a" * 200_000},
    "has too many alternatives": {
        "guided_json": {"allOf": [
            {"anyOf": [{"properties": {f"{n}{i}": {}}} for n in "pq"]} for i in range(20)
        ]}
    },
}  # fmt: skip


def test_hostile_grammars_are_refused_by_name_and_stall_nothing(server, monkeypatch):
    monkeypatch.setattr(sandbox, "COMPILE_TIMEOUT", 0.7)
    before = time.perf_counter()
    good = {"prompt": "red", "max_tokens": 3}
    for what, body in HOSTILE.items():
        refused, answered = ask(server, body, good)
        assert refused[0] == 400, what
        assert refused[1]["error"]["param"] == next(iter(body))
        assert answered[0] == 200
    assert time.perf_counter() - before < 30
    ((status, _),) = ask(server, {"guided_choice": ["red", "bred"]})  # its process is a new one
    assert status == 200


def test_what_contradicts_a_grammar(server):
    both = {"guided_regex": "a", "guided_choice": ["b"]}
    rule = {"guided_regex": "a", "domino": {"accept": "block"}}
    found = ask(server, both, rule)
    assert [status for status, _ in found] == [400, 400]
    assert [body["error"]["param"] for _, body in found] == ["guided_choice", "domino.accept"]


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    decoder = DominoDecoder(make_target("llama"), None, json_tokenizer())
    with pytest.raises(InputError, match=r"need the llguidance package; pip install 'domino-spec"):
        decoder.generate("red", grammar=Grammar.json_object(), max_new_tokens=5)
