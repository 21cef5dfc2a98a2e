from __future__ import annotations

import time

import pytest

from domino_spec.data.answer import AnswerSettings, answer_prompts
from domino_spec.data.prompts import PromptRow, PromptSet
from domino_spec.data.server import ServerAnswerer
from domino_spec.errors import DataError
from tests.data.decoders import VOCAB, contents
from tests.data.fake_server import says, serving
from tests.data.test_answer import rows_of
from tests.data.test_chat import CHATML, tokenizer_with
from tests.support.tokens import small_tokenizer

ANSWERS = {"the fox": "jumps over", "the dog": "falls, then the next", "a domino": "the lazy dog"}
PROMPTS = PromptSet([PromptRow((text,)) for text in ANSWERS])
SETTINGS = AnswerSettings(max_new_tokens=9, temperatures=(0.0, 1.0), part_size=2)


def answers(body, before):
    return says(ANSWERS[body["messages"][-1]["content"]])


def run(folder, fake, *, prompts=PROMPTS, settings=SETTINGS, tokenizer=None, **options):
    values = {"retries": 3, "first_wait": 0.01, "concurrency": 4, **options}
    answerer = ServerAnswerer(fake.url, tokenizer=tokenizer or small_tokenizer(), **values)
    return answer_prompts(
        prompts, answerer, folder, settings, vocab_size=VOCAB, identity={"by": answerer.model}
    )


def texts_in(folder, tokenizer=None) -> list[tuple[str, str]]:
    tokenizer = tokenizer or small_tokenizer()
    return [
        (tokenizer.decode(tokens[:cut]), tokenizer.decode(tokens[cut:]))
        for tokens, cut, _ in rows_of(folder)
    ]


def test_answers_are_tokenised_through_the_template(tmp_path):
    with serving(answers) as fake:
        done = run(tmp_path, fake)
    assert (done.answered, done.done) == (3, 3)
    assert texts_in(tmp_path) == [
        (f"<|user|>{prompt}<|end|><|assistant|>", f"{answer}<|end|>")
        for prompt, answer in ANSWERS.items()
    ]
    temperatures = {body["messages"][-1]["content"]: body["temperature"] for body in fake.bodies}
    assert list(temperatures.values()) != [0.0] * 3
    assert {row[2] for row in rows_of(tmp_path)} == set(temperatures.values())
    for body in fake.bodies:
        assert (body["model"], body["max_tokens"], body["top_p"]) == ("served", 9, 1.0)
    assert len({body["seed"] for body in fake.bodies}) == 3
    assert fake.keys == [None] * 3


def test_a_cut_answer_does_not_end_and_trailing_text_is_nobodys(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    with serving(lambda body, _: says("jumps over", "length")) as fake:
        run(tmp_path / "cut", fake, tokenizer=tokenizer)
    assert {answer for _, answer in texts_in(tmp_path / "cut", tokenizer)} == {"jumps over"}
    with serving(lambda body, _: says("jumps over")) as fake:
        run(tmp_path / "whole", fake, tokenizer=tokenizer)
    ends = {answer for _, answer in texts_in(tmp_path / "whole", tokenizer)}
    assert ends == {"jumps over<|end|>"}


def test_the_key_the_name_and_the_templates_options_are_sent(tmp_path):
    with serving(answers) as fake:
        run(tmp_path, fake, api_key="secret", model="mine", chat_options={"enable_thinking": False})
    assert set(fake.keys) == {"Bearer secret"}
    assert {body["model"] for body in fake.bodies} == {"mine"}
    assert fake.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "failure",
    [(500, {"error": "busy"}), (503, b"<html>"), (429, {"error": {"message": "slow"}}), None,
     (200, b"not json"), (200, [])],
)  # fmt: skip
def test_what_passes_is_tried_again(failure, tmp_path):
    def respond(body, before):
        return failure if before < 2 else answers(body, before)

    with serving(respond) as fake:
        done = run(tmp_path, fake)
    assert done.answered == 3
    assert len(fake.bodies) == 9


def test_a_server_that_stays_away_is_an_error_and_going_on_asks_only_the_rest(tmp_path):
    def respond(body, before):
        down = body["messages"][-1]["content"] == "a domino"
        return (503, {"error": {"message": "overloaded"}}) if down else answers(body, before)

    with serving(respond) as fake, pytest.raises(DataError) as caught:
        run(tmp_path / "parts", fake, retries=2)
    assert "answered 503 overloaded, 3 times" in str(caught.value)
    assert "run the same command again" in str(caught.value)
    assert fake.asked().count("a domino") == 3
    with serving(answers) as fake:
        done = run(tmp_path / "parts", fake)
        assert fake.asked() == ["a domino"]
        run(tmp_path / "whole", fake)
    assert done.answered == 3
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_refused_prompt_is_counted_and_the_rest_go_on(tmp_path):
    def respond(body, before):
        if body["messages"][-1]["content"] == "the dog":
            return 400, {"error": {"message": "too long"}}
        return answers(body, before)

    with serving(respond) as fake:
        done = run(tmp_path, fake)
    assert done.answered == 2
    assert dict(done.dropped) == {"the server refused it (400 too long)": 1}
    assert len(fake.bodies) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_set_up_ends_at_once(status, tmp_path):
    with (
        serving(lambda *_: (status, {"error": {"message": "no"}})) as fake,
        pytest.raises(DataError, match=f"answered {status} no; check the URL"),
    ):
        run(tmp_path, fake, concurrency=1)
    assert len(fake.bodies) <= 2


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (says("falls", reasoning_content="hm"), "without a reasoning parser"),
        ((200, {"object": "list"}), "Is it an OpenAI-compatible server"),
    ],
)
def test_replies_that_cannot_be_used(reply, message, tmp_path):
    with serving(lambda *_: reply) as fake, pytest.raises(DataError, match=message):
        run(tmp_path, fake)


def test_answers_that_are_none_are_dropped(tmp_path):
    with serving(lambda *_: says(" ")) as fake:
        done = run(tmp_path / "empty", fake)
    assert dict(done.dropped) == {"the server's answer is empty": 3}
    stripping = tokenizer_with(CHATML.replace("m['content']", "m['content'].split('x')[-1]"))
    with serving(lambda *_: says("quick x fox")) as fake:
        done = run(tmp_path / "stripped", fake, tokenizer=stripping)
    assert "does not repeat the answer" in next(iter(done.dropped))


def test_many_are_asked_at_once_but_not_too_many(tmp_path):
    def respond(body, before):
        time.sleep(0.05)
        return says("jumps over")

    prompts = PromptSet([PromptRow((f"the fox {'a' * i}",)) for i in range(12)])
    with serving(respond) as fake:
        run(tmp_path, fake, prompts=prompts, settings=AnswerSettings(part_size=12), concurrency=3)
    assert 2 <= fake.busiest <= 3


def test_urls():
    with serving(answers) as fake:
        for url in (fake.url + "/", fake.url + "/v1", fake.url + "/v1/"):
            assert ServerAnswerer(url, tokenizer=small_tokenizer()).model == "served"
        fake.models.clear()
        with pytest.raises(DataError, match="--server-model"):
            ServerAnswerer(fake.url, tokenizer=small_tokenizer())
    with pytest.raises(DataError, match="expected a URL"):
        ServerAnswerer("localhost:8000", tokenizer=small_tokenizer())
    with pytest.raises(DataError, match="failed: .*refused, 2 times"):
        ServerAnswerer(fake.url, tokenizer=small_tokenizer(), retries=1, first_wait=0.01)
