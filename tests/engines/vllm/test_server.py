"""The OpenAI server with the plugin, spoken to by the official client."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")
openai = pytest.importorskip("openai")

QUESTION = [{"role": "user", "content": "List five things to pack for a rainy weekend."}]
START_SECONDS = 240
KEY = "sesame-open-1"


@pytest.fixture(scope="module")
def server(smollm2_folder, tmp_path_factory) -> Iterator[str]:
    """`domino serve --backend vllm` with the released drafter, which is packed: it exports it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-c", "from domino_spec.cli.main import main; main()", "serve",
        str(smollm2_folder), "--draft", "released:smollm2-135m-instruct", "--backend", "vllm",
        "--engine-python", sys.executable, "--model-name", "smollm2", "--port", str(port),
        "--context", "1024", "--slots", "4",
    ]  # fmt: skip
    place = tmp_path_factory.mktemp("server")
    environment = {
        **os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(place / "cache"), "DOMINO_API_KEY": KEY,
    }  # fmt: skip
    log = place / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        code = process.wait(60)
    assert KEY not in log.read_text()
    assert code in (0, 128 + signal.SIGTERM), log.read_text()[-4000:]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "vLLM outlived the command"


def _wait(process: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(START_SECONDS):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=2)
        except OSError:
            time.sleep(1)
        else:
            return
    raise AssertionError(f"the server did not start:\n{log.read_text()[-4000:]}")


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY)


def ask(client, **more) -> str:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=48, **more
    )
    return answer.choices[0].message.content


def accepted(server: str) -> float:
    text = urllib.request.urlopen(f"{server}/metrics", timeout=10).read().decode()
    found = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", text, re.MULTILINE)
    return sum(map(float, found))


def test_streamed_and_whole_answers_agree_and_drafts_are_accepted(server, client):
    before = accepted(server)
    whole = ask(client)
    chunks = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=48, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole == streamed
    assert accepted(server) - before > 30


def test_a_key_is_asked_for(server):
    stranger = openai.OpenAI(base_url=f"{server}/v1", api_key="another", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        ask(stranger)


def test_structured_output_is_kept_under_speculation(client):
    schema = {
        "type": "object",
        "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["item", "count"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    found = json.loads(ask(client, response_format=shape))
    assert set(found) == {"item", "count"}
    assert isinstance(found["count"], int)


def test_a_choice_is_one_of_the_choices(client):
    choices = ["umbrella", "sunglasses", "snowboard"]
    assert ask(client, extra_body={"structured_outputs": {"choice": choices}}) in choices
