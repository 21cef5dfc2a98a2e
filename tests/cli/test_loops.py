"""--engine and --dtype fastest: what ran is said, to people and to machines."""

from __future__ import annotations

import json

import pytest
import torch

from domino_spec.api import DtypeNotice, decoder
from domino_spec.api import dtypes as api_dtypes
from domino_spec.cli.doctor import _dtype
from domino_spec.settings import TargetOptions
from tests.support.families import make_model

PROMPT = "what is the answer"


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_both_engines_give_the_same_and_say_which_ran(domino, target, draft):
    arguments = ("generate", target, PROMPT, "--draft", draft, "-n", 20, "--json", "--depth", 5)
    runs = {
        name: document(domino(*arguments, "--engine", name))
        for name in ("auto", "fast", "reference")
    }
    assert len({str(run["generations"][0]["tokens"]) for run in runs.values()}) == 1
    assert [run["run"]["engine"] for run in runs.values()] == ["fast", "fast", "reference"]
    fast, loop = runs["fast"]["run"], runs["reference"]["run"]
    assert fast["engine_reason"] is None
    assert fast["draft_seconds"] is fast["verify_seconds"] is None
    assert fast["cycle_seconds"] > 0
    stages = ("draft_seconds", "verify_seconds", "other_seconds")
    assert loop["cycle_seconds"] == pytest.approx(sum(loop[stage] for stage in stages))
    assert not any(run["notes"] or run["warnings"] or run["depth_adapts"] for run in runs.values())


def test_a_fallback_is_a_note_and_a_refusal_an_error(domino, target, draft, monkeypatch):
    arguments = ("generate", target, PROMPT, "--draft", draft, "-n", 6)
    rule = ("--temperature", 0.8, "--seed", 1)
    monkeypatch.setattr(decoder, "unsupported_request", lambda _: "it asks for too much")
    shown = domino(*arguments, *rule)
    (line,) = [line for line in shown.stderr.splitlines() if "reference loop does" in line]
    assert "as for the request, it asks for too much" in line
    assert "warning" not in shown.stderr
    assert "draft" in shown.stderr.splitlines()[-1]
    told = document(domino(*arguments, *rule, "--json"))
    assert told["notes"] == [line]
    assert "it asks for too much" in told["run"]["engine_reason"]
    assert domino(*arguments, *rule, "-q").stderr == ""
    refused = domino(*arguments, *rule, "--engine", "fast")
    assert refused.exit_code == 1
    assert "engine is 'fast', but" in refused.stderr


def test_statistics_of_the_engine_do_not_pretend_to_stages(domino, target, draft):
    shown = domino("generate", target, PROMPT, "--draft", draft, "-n", 6, "--no-pack")
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("time prefill ")
    assert "· cycles " in last
    assert last.endswith("on the engine")
    assert "verify" not in last


def test_a_chat_is_the_same_on_both(domino, target, draft):
    words = "hello\nmore\n/stats\n"
    chats = [
        domino("chat", target, "--draft", draft, "-n", 8, "--engine", name, stdin=words)
        for name in ("fast", "reference")
    ]
    assert chats[0].stdout == chats[1].stdout
    assert chats[0].stderr.splitlines()[-1].endswith("on the engine")
    assert "verify" in chats[1].stderr.splitlines()[-1]


def test_the_demo_says_which_ran(domino, target, draft):
    arguments = ("demo", "--target", target, "--draft", draft, "--prompts", 1, "-n", 6)
    assert "on cpu with 1 thread, the engine" in domino(*arguments, "--device", "cpu").stdout
    values = document(domino(*arguments, "--engine", "reference", "--json"))
    assert values["engine"] == "reference"
    assert values["identical"]


def test_the_fastest_type(domino, target, monkeypatch):
    times = {torch.float32: 1.0, torch.bfloat16: 0.5}
    monkeypatch.setattr(api_dtypes, "product_seconds", lambda: times)
    arguments = ("generate", target, PROMPT, "-n", 3, "--json", "--device", "cpu")
    rounded = document(domino(*arguments, "--dtype", "fastest"))
    assert rounded["dtype"] == "bfloat16"
    assert "weights are rounded" in rounded["notes"][0]
    times[torch.bfloat16] = 20.0
    assert document(domino(*arguments, "--dtype", "fastest"))["dtype"] == "float32"
    assert document(domino(*arguments))["dtype"] == "float32"


def test_a_family_the_engine_does_not_know(domino, tmp_path):
    from tests.cli import tiny

    make_model("gemma2").save_pretrained(tmp_path)
    tokenizer = tiny.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    run = document(domino("generate", tmp_path, "1", "--raw", "-n", 3, "--json"))
    assert run["run"]["engine"] == "reference"
    assert "Gemma2ForCausalLM" in run["notes"][0]


def test_the_doctor_reckons_with_the_type_that_would_be_taken(monkeypatch):
    monkeypatch.setattr(api_dtypes, "faster_on_cpu", lambda: torch.bfloat16)
    config = make_model("llama").config
    config.dtype = torch.float32
    with pytest.warns(DtypeNotice, match="rounded"):
        found = _dtype(TargetOptions(dtype="fastest"), config, torch.device("cpu"))
    assert found == torch.bfloat16
