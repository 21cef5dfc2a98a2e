from __future__ import annotations

import json

import pytest

from domino_spec.data import read_shard
from tests.data.fake_server import says, serving


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def one_error(result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"what is the answer to the question {index}"]} for index in range(5)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_from_nothing_to_training_data(domino, target, tmp_path):
    made = document(
        domino("data", "synth", target, "--out", tmp_path / "made", "-n", 3, "--max-tokens", 60,
               "--min-tokens", 1, "--part-size", 32, "--json")
    )  # fmt: skip
    assert made["prompts"] == made["wanted"] == 3
    answered = document(
        domino("data", "answer", target, tmp_path / "made", "--out", tmp_path / "answers",
               "-n", 8, "-t", 0, "-t", 1, "--json")
    )  # fmt: skip
    assert answered["done"] == 3
    assert answered["bytes"] > 0
    found = document(domino("data", "check", target, tmp_path / "answers", "--json"))
    assert found["conversations"] == answered["answered"]
    assert found["sources"] == {"self": answered["answered"]}
    assert found["packing"]["rows"] == 1
    assert len(found["fingerprint"]) == 64


def test_a_base_model_opens_texts_and_continues_them(domino, base_target, tmp_path):
    made = document(
        domino("data", "synth", base_target, "--out", tmp_path / "made", "-n", 3,
               "--max-tokens", 6, "--json")
    )  # fmt: skip
    assert made["prompts"] == 3
    assert "too long" not in made["dropped"]  # an opening is cut, not finished
    answered = document(
        domino("data", "answer", base_target, tmp_path / "made", "--out", tmp_path / "answers",
               "-n", 8, "-t", 1, "--json")
    )  # fmt: skip
    assert answered["answered"] == 3


def test_a_person_sees_what_is_ahead_and_what_came_of_it(domino, target, prompts, tmp_path):
    result = domino("data", "answer", target, prompts, "--out", tmp_path / "out", "-n", 6)
    assert result.exit_code == 0, result.output
    assert "5 prompts: at most" in result.stderr
    assert "tok/s · about" in result.stderr
    assert result.stdout.startswith("5 answers to 5 prompts in ")
    quiet = domino("data", "answer", target, prompts, "--out", tmp_path / "q", "-n", 6, "-q")
    assert (quiet.exit_code, quiet.stderr) == (0, "")


def test_going_on_and_being_refused(domino, target, prompts, tmp_path):
    arguments = ("data", "answer", target, prompts, "--out", tmp_path / "out", "-n", 6)
    first = document(domino(*arguments, "--part-size", 2, "--json"))
    assert first["session_prompts"] == 5
    second = document(domino(*arguments, "--part-size", 2, "--json"))
    assert (second["answered"], second["session_prompts"]) == (first["answered"], 0)
    assert "seed 0, now it is 1" in one_error(domino(*arguments, "--part-size", 2, "--seed", 1))


def test_drafts_change_nothing(domino, target, draft, prompts, tmp_path):
    for name, flags in (("plain", ()), ("fast", ("--draft", draft))):
        out = tmp_path / name
        assert not domino(
            "data", "answer", target, prompts, "--out", out, "-n", 10, *flags
        ).exit_code
    plain, fast = (read_shard(tmp_path / name / "part-00000.npz") for name in ("plain", "fast"))
    assert plain.tokens.tolist() == fast.tokens.tolist()
    assert plain.tokenizer_sha256 == fast.tokenizer_sha256 is not None


def test_a_server_answers_and_the_weights_are_not_loaded(domino, target, prompts, tmp_path):
    with serving(lambda *_: says("the lazy dog")) as fake:
        result = domino(
            "data", "answer", target, prompts, "--out", tmp_path / "out", "--server", fake.url,
            "--api-key-env", "MY_KEY", "--format", "jsonl", "--system", "be brief", MY_KEY="k",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "loading target" not in result.stderr
    assert set(fake.keys) == {"Bearer k"}
    rows = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    messages = json.loads(rows[0])["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[-1]["content"] == "the lazy dog"


def test_check_says_what_was_left_out(domino, target, tmp_path):
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good) + "\n{\n")
    result = domino("data", "check", target, path)
    assert result.exit_code == 0, result.output
    assert "1 conversations, " in result.stdout
    assert f"1 left out: it is not valid JSON (first: {path}, line 2)" in result.stdout
    assert "packed: 1 rows of 1024" in result.stdout


def test_no_answer_at_all_is_an_error(domino, target, tmp_path):
    prompts = tmp_path / "long.jsonl"
    prompts.write_text(json.dumps({"turns": ["what is " * 200]}) + "\n")
    arguments = ("data", "answer", target, prompts, "--out", tmp_path / "out", "-n", 6)
    for _ in range(2):  # and when it is gone on with
        line = one_error(domino(*arguments))
        assert "no prompt was answered (1 dropped: its prompt and answer would not fit" in line
    machine = domino(*arguments, "--json")
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["answered"] == 0


CASES = {
    "prompts are no data": (["check", "{target}", "{prompts}"], "domino data answer"),
    "gone": (["check", "{target}", "gone.jsonl"], "there is no gone.jsonl"),
    "no prompts": (["answer", "{target}", "gone.txt", "--out", "{out}"], "there is no gone.txt"),
    "cold": (
        ["answer", "{target}", "{prompts}", "--out", "{out}", "-t", "-1"],
        "temperatures is -1.0",
    ),
    "greedy": (["synth", "{target}", "--out", "{out}", "-n", "2", "-t", "0"], "greedy drawing"),
    "chats without a template": (["check", "{base}", "{chats}"], "`domino data answer` without"),
    "system without a template": (
        ["synth", "{base}", "--out", "{out}", "-n", "2", "--system", "Be kind."],
        "drop --system",
    ),
    "a file in the way of prompts": (
        ["synth", "{target}", "--out", "{prompts}", "-n", "2"],
        "prompts.jsonl is a file; expected a folder",
    ),
    "a file in the way of answers": (
        ["answer", "{target}", "{prompts}", "--out", "{prompts}"],
        "prompts.jsonl is a file; expected a folder",
    ),
    "no server": (
        ["answer", "{target}", "{prompts}", "--out", "{out}", "--server", "here"],
        "expected a URL",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line(case, domino, target, base_target, prompts, tmp_path):
    arguments, expected = CASES[case]
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "the fox"}]
    chats.write_text(json.dumps({"messages": turns}))
    names = {"target": target, "base": base_target, "prompts": prompts, "chats": chats,
             "out": tmp_path / "out"}  # fmt: skip
    result = domino("data", *[argument.format(**names) for argument in arguments])
    assert expected in one_error(result)
    assert not (tmp_path / "out").exists()
