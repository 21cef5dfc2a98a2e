"""The OpenAI server with the plugin, spoken to by the official client."""

import json
import os
import re
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


@pytest.fixture(scope="module")
def server(smollm2_folder, released_folder, tmp_path_factory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculative = {"method": "dflash", "model": str(released_folder), "num_speculative_tokens": 15}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_folder),
        "--served-model-name", "smollm2", "--port", str(port), "--host", "127.0.0.1", "--dtype",
        "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4",
        "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


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
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none")


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
