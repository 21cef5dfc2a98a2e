"""`domino bench serve`."""

import json
import os
import signal

import pytest
from typer.testing import CliRunner

from domino_spec.cli.main import app
from domino_spec.load.runner import run_load
from domino_spec.load.settings import LoadSettings
from domino_spec.load.summary import read_runs
from domino_spec.records import read_records
from tests.load.fake import FACTS

QUICK = ("--prompts", "chat", "--requests", "4", "--warm-up", "1")


@pytest.fixture
def serve(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*arguments, url=fake.url):
        out = ("--out", str(tmp_path / "r.jsonl"))
        return CliRunner().invoke(app, ["bench", "serve", url, *QUICK, *arguments, *out])

    call.out = tmp_path / "r.jsonl"
    return call


def test_loads_one_after_the_other(serve, fake):
    result = serve("-c", "1", "2", "--rate", "500")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["concurrency", "1", "measured", "4", "of", "4"] in [row[:6] for row in rows]
    assert ["500", "req/s", "measured", "4", "of", "4"] in [row[:6] for row in rows]
    first, *rest = read_records(serve.out)
    assert first["sides"][0]["server"] == FACTS
    assert first["sides"][0]["model"] == "org/tiny"
    assert first["environment"]["hardware"]
    counted = [r for r in rest if r["kind"] == "request" and not r["warm_up"]]
    assert [(r["concurrency"], r["rate"]) for r in counted] == (
        [(1, None)] * 4 + [(2, None)] * 4 + [(None, 500.0)] * 4
    )
    assert len(fake.bodies) == 3 * (1 + 4)
    asked = fake.bodies[1]
    assert asked["messages"][0]["role"] == "user"
    assert (asked["temperature"], asked["seed"], asked["stream"]) == (0.0, 0, True)
    assert asked["stream_options"] == {"include_usage": True}


def test_two_ways_of_asking_one_server(serve, fake):
    result = serve(
        "-c", "2", "--rounds", "5", "--body", '{"domino": {"blocks": true}, "seed": null}',
        "--against", '{"domino": {"speculate": false}}', "--name", "drafts",
        "--against-name", "plain", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (cell,) = found["cells"]
    assert [side["name"] for side in cell["sides"]] == ["drafts", "plain"]
    assert [side["completed"] for side in cell["sides"]] == [20, 20]
    assert cell["comparison"]["rounds"] == 5
    assert cell["comparison"]["same"] == cell["comparison"]["compared"] == 20
    assert cell["comparison"]["tokens_per_second"]["low"] is not None
    assert found["records"] == str(serve.out)
    (again,) = read_runs(serve.out)  # all figures come from the records
    assert json.loads(json.dumps(again.to_dict()))["cells"] == found["cells"]
    bodies = [body["domino"] for body in fake.bodies]
    assert bodies.count({"blocks": True}) == bodies.count({"blocks": True, "speculate": False})
    assert not any("seed" in body for body in fake.bodies)


def test_a_run_with_failures_says_which(serve):
    result = serve("-c", "1", "--warm-up", "0", "--body", '{"fake": "normal busy crash cut"}')
    assert result.exit_code == 0, result.output
    assert "1 of 4" in result.stdout
    for words in ("1 busy", "1 HTTP 500", "1 broken stream"):
        assert words in result.stdout


def test_nothing_but_failures_is_a_failure(serve):
    result = serve("-c", "1", "--body", '{"fake": "crash"}')
    assert result.exit_code == 1
    assert "4 HTTP 500" in result.stdout
    assert "no request was completed" in result.stderr
    requests = [r for r in read_records(serve.out) if r["kind"] == "request"]
    assert [r["message"] for r in requests] == ["oh no"] * 5


def test_keys_are_sent_and_never_written(serve, fake, monkeypatch):
    monkeypatch.delenv("DOMINO_COMMAND", raising=False)
    monkeypatch.setattr("sys.argv", ["domino", "bench", "serve", "--api-key=/sek/rit"])
    result = serve("-c", "1", "--api-key", "/sek/rit", "--json")
    assert result.exit_code == 0, result.output
    assert all("Bearer /sek/rit" in head for head in fake.headers)
    text = serve.out.read_text()
    assert "--api-key=***" in text
    assert "sek/rit" not in text + result.output
    monkeypatch.setenv("MY_KEY", "from-outside")
    serve("-c", "1", "--api-key-env", "MY_KEY")
    assert "Bearer from-outside" in fake.headers[-1]
    assert "from-outside" not in serve.out.read_text()


def test_a_key_does_not_go_to_another_server(serve, fake):
    other = f"http://localhost:{fake.port}"
    result = serve("-c", "1", "--rounds", "1", "--api-key", "mine", "--against", other)
    assert result.exit_code == 0, result.output
    with_key = ["Bearer mine" in head for head in fake.headers]
    hosts = ["Host: localhost" in head for head in fake.headers]
    assert any(hosts)
    assert with_key == [not host for host in hosts]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-c", "8"), "never reaches concurrency 8"),
        (("-c", "0"), "concurrency is 0"),
        (("--rate", "0"), "rate is 0"),
        (("-c", "1", "1"), "given twice"),
        (("--rounds", "0"), "rounds is 0"),
        (("--body", "["), "invalid JSON"),
        (("--body", "[]"), "valid dictionary"),
        (("--against", "{"), "not valid JSON"),
        (("--body", "{"), "invalid JSON"),
        (("--body", '{"stream": false}'), "--no-stream"),
        (("--against-body", "{}"), "has no --against"),
        (("--against", "{}"), "the same requests to the same server"),
        (("--against", '{"a": 1}', "--against-name", "measured"), "both sides are called"),
        (("--prompts", "nothing.jsonl"), "there is no nothing.jsonl"),
        (("--endpoint", "completions", "--system", "x"), "needs the chat endpoint"),
        (("--token-goal", "0"), "token_goal is 0"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--timeout", "-1"), "timeout is -1"),
        (("--against", "http://[bad"), "Invalid IPv6 URL"),
    ],
)
def test_what_makes_no_sense_is_one_line(serve, arguments, words):
    result = serve("-c", "2", *arguments) if "-c" not in arguments else serve(*arguments)
    assert result.exit_code == 1, result.output
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_server_that_does_not_run(serve):
    result = serve("-c", "1", url="http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "nothing answers at" in result.stderr


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_ends_with_what_there_is(fake, tmp_path):
    def interrupt(cell, side, done, total):
        if done == 10:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "r.jsonl"
    settings = LoadSettings(url=fake.url, concurrency=[2], requests=5000, out=out)
    summary, path, complete = run_load(settings, progress=interrupt)
    assert not complete
    (side,) = summary.cells[0].sides
    assert 10 <= side.completed < 5000
    kept = [r for r in read_records(path) if r["kind"] == "request" and not r["warm_up"]]
    assert len(kept) == side.requests


def test_the_default_file_is_named_after_the_model(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "serve", fake.url, *QUICK, "-c", "1", "--first-token-goal", "5"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "goodput, req/s" in result.stdout
    (path,) = tmp_path.glob("load-tiny-*.jsonl")
    assert str(path.name) in result.stderr
