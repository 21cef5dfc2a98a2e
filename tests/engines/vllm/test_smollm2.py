"""A real model with its released drafter, in an engine and in vLLM's OpenAI server.

The engine gives our decoder's tokens in as many cycles; the official client talks to the server.
"""

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
import torch
from benchmarks.engine_folders import write_draft, write_target

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import encode_prompt
from domino_spec.demo import PROMPTS, smollm2
from domino_spec.targets import load_target
from tests.engines.vllm.job import run_job
from tests.engines.vllm.reference import reference_blocks

pytest.importorskip("vllm", reason="needs the engines' environment: make test-engines")
openai = pytest.importorskip("openai")

TOKENS = 48
DRAFTS = 15
QUESTION = [{"role": "user", "content": "List five things to pack for a rainy weekend."}]
START_SECONDS = 240
KEY = "sesame-open-1"


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory) -> Path:
    """The model that the package carries as GGUF, as an ordinary folder in float32."""
    return write_target(smollm2(), tmp_path_factory.mktemp("smollm2"), dtype=torch.float32)


@pytest.fixture(scope="module")
def released_folder(tmp_path_factory) -> Path:
    """The main released drafter, unpacked."""
    folder = tmp_path_factory.mktemp("released")
    name = "released:smollm2-135m-instruct"
    return write_draft(name, folder, method="dflash", dtype=torch.float32)


def test_same_tokens_same_drafts_and_as_many_cycles(smollm2_folder, released_folder):
    loaded = load_target(str(smollm2_folder), device="cpu", dtype=torch.float32)
    decoder = DominoDecoder.from_pretrained(loaded, str(released_folder), depth=DRAFTS)
    prompts = [
        encode_prompt([{"role": "user", "content": text}], loaded.tokenizer) for text in PROMPTS[:3]
    ]
    ours = [decoder.generate(prompt, max_new_tokens=TOKENS) for prompt in prompts]
    result = run_job(
        target=str(smollm2_folder),
        speculative={
            "method": "dflash", "model": str(released_folder), "num_speculative_tokens": DRAFTS,
        },
        prompts=prompts,
        sampling={"max_tokens": TOKENS, "stop_token_ids": [loaded.tokenizer.eos_token_id]},
        engine={
            "max_num_seqs": len(prompts), "kv_cache_memory_bytes": 1 << 27,
        },
        record=True,
    )  # fmt: skip
    assert [answer[0] for answer in result["answers"][0]] == [one.tokens for one in ours]

    known = {
        tuple(block)
        for prompt, one in zip(prompts, ours, strict=True)
        for block in reference_blocks(
            loaded.target,
            decoder.drafter.model,
            prompt + one.tokens,
            first=len(prompt),
            depth=DRAFTS,
        )[:-1]  # after the last token nothing is drafted
    }
    theirs = [tuple(block) for block in result["blocks"]]
    inside = [block for block in theirs if block in known]
    # vLLM drafts once after the prefill and once after each cycle, before which it may not know
    # that the request has ended; its own counters leave that cycle out.
    assert len(theirs) - len(inside) <= len(prompts), "at most one block a request, past its end"
    cycles = sum(one.stats.cycles for one in ours)
    assert len(inside) == cycles
    committed = sum(len(one.tokens) - 1 for one in ours)  # the prefill's token is in no cycle
    assert committed / cycles > 2, "a trained drafter"


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
    inspected = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    environment = {
        **os.environ, "VLLM_CPU_CI_ENV": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(place / "cache"), "DOMINO_API_KEY": KEY,
        "VLLM_CACHE_ROOT": f"{inspected}/vllm", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
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
