from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import transformers as tf

from domino_spec.cli import generate as generate_module
from domino_spec.cli.render import TokenWriter
from tests.cli import tiny
from tests.support.ggufs import write_gguf

PROMPT = "what is the answer"


def errors_of(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


CASES = {
    "unknown model": (["no-such-folder", PROMPT], "no model at no-such-folder"),
    "unknown drafter": (["{target}", PROMPT, "--draft", "./nothing"], "no file or folder"),
    "another target's drafter": (["{wide}", PROMPT, "--draft", "{draft}"], "hidden size 32"),
    "a drafter as target": (["{draft}", PROMPT], "is a drafter"),
    "no candidates": (
        ["{target}", PROMPT, "--draft", "{draft}", "--candidates", "0"],
        "leave it out",
    ),
    "a window shorter than a block": (
        ["{target}", PROMPT, "--draft", "{draft}", "--draft-window", "2"],
        "draft_window is 2; expected 8 or more",
    ),
    "a target as drafter": (["{target}", PROMPT, "--draft", "{target}"], "drafter"),
    "negative temperature": (["{target}", PROMPT, "-t", "-1"], "temperature is -1.0"),
    "no new tokens": (["{target}", PROMPT, "-n", "0"], "max_new_tokens is 0"),
    "empty prompt": (["{target}", " "], "the prompt is empty"),
    "one empty prompt of two": (["{target}", PROMPT, "-p", ""], "prompt 2 of 2 is empty"),
    "no tokenizer": (["{mute}", PROMPT], "without a tokenizer"),
    "long prompt": (["{target}", "x " * tiny.CONTEXT, "-n", "5"], "context of 256"),
    "deep": (["{target}", PROMPT, "--draft", "{draft}", "--depth", "99"], "depth is 99"),
    "tree of chains": (
        ["{target}", PROMPT, "--draft", "lookup", "--tree", "7"],
        "a tree of 7 drafts is asked for",
    ),
    "contradicted alignment": (
        ["{target}", PROMPT, "--draft", "{draft}", "--no-shift-label"],
        "shift_label",
    ),
    "missing prompt file": (["{target}", "--prompt-file", "gone.txt"], "cannot be read"),
    "unknown device": (["{target}", PROMPT, "--device", "gpu"], "device is 'gpu'"),
    "absent device": (["{target}", PROMPT, "--device", "cuda:63"], "GPUs here"),
    "broken device map": (["{target}", PROMPT, "--device-map", "{{"], "not valid JSON"),
    "system and raw": (["{target}", PROMPT, "--raw", "--system", "s"], "drop --system"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line(case, domino, target, wide_target, mute_target, draft):
    arguments, expected = CASES[case]
    names = {"target": target, "wide": wide_target, "mute": mute_target, "draft": draft}
    filled = [argument.format(**names) for argument in arguments]
    result = domino("generate", *filled)
    assert result.exit_code == 1
    (line,) = errors_of(result)
    assert expected in line
    assert "Traceback" not in result.output
    assert "DOMINO_DEBUG" not in line
    machine = domino("generate", *filled, "--json")
    assert machine.exit_code == 1
    error = json.loads(machine.stdout)["error"]
    assert expected in error["message"]
    assert error["type"].endswith("Error")


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "t"], ["generate", "t", "-", "-"], ["fly"]]
)
def test_usage_errors_exit_with_2(arguments, domino):
    result = domino(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_unexpected_errors_offer_a_traceback(domino, monkeypatch, target):
    def explode(*_, **__):
        raise KeyError("boom\nand more")

    monkeypatch.setattr(generate_module, "load_decoder", explode)
    result = domino("generate", target, PROMPT)
    assert result.exit_code == 1
    (line,) = errors_of(result)
    assert "KeyError" in line
    assert "run again with DOMINO_DEBUG=1" in line
    assert "Traceback" not in result.output
    assert "Traceback" in domino("generate", target, PROMPT, DOMINO_DEBUG="1").stderr


def test_interrupting_exits_with_130(domino, monkeypatch, target):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "load_decoder", interrupt)
    result = domino("generate", target, PROMPT)
    assert result.exit_code == 130
    assert "error" not in result.output


def test_a_reader_that_leaves_early_is_no_error(draft):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "domino_spec", "info", draft]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_while_generating_leaves_without_a_traceback(domino, target, monkeypatch):
    write, written = TokenWriter.write, []

    def interrupted(self, token):
        write(self, token)
        written.append(token)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TokenWriter, "write", interrupted)
    result = domino("generate", target, PROMPT, "-n", "240", "--ignore-eos", "--raw")
    assert result.exit_code == 130
    assert len(written) == 3
    assert result.stderr.endswith("\ninterrupted\n")
    assert "Traceback" not in result.output


def test_version(domino):
    from domino_spec import __version__

    result = domino("--version")
    assert result.exit_code == 0
    assert result.stdout == f"domino-spec {__version__}\n"


def test_binary_stdin_is_refused_before_anything_is_loaded(domino):
    result = domino("generate", "no-such-target", "-", stdin=b"\xff\xfe\x00")
    assert errors_of(result) == ["error: the prompt from stdin is not UTF-8 text."]
    assert "loading" not in result.stderr


def test_a_wrong_depth_is_found_before_the_target_is_loaded(domino, target, draft):
    result = domino("generate", target, PROMPT, "--draft", draft, "--depth", 99)
    assert result.exit_code == 1
    assert "loading target" not in result.stderr


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "domino_spec", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("domino-spec ")


COMMANDS = {
    "generate": ("generate", "{wide}", PROMPT, "--draft", "{draft}"),
    "answer": ("data", "answer", "{wide}", "{prompts}", "--out", "{out}", "--draft", "{draft}"),
    "bench": ("bench", "{wide}", "--draft", "{draft}"),
    "bench, a Medusa": ("bench", "{wide}", "--draft", "{medusa}"),
    "eval": ("eval", "{wide}", "--prompts", "chat", "--draft", "{draft}"),
    "train": ("train", "{wide}", "--data", "{talks}", "--out", "{out}", "--init", "{draft}"),
    "a GGUF file": ("generate", "{gguf}", PROMPT, "--draft", "{draft}"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_drafter_of_another_target_is_refused_before_weights_are_loaded(
    case, domino, wide_target, draft, medusa, talks, tmp_path, monkeypatch
):
    def loaded(*_, **__):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["what"]}\n')
    names = {"wide": wide_target, "draft": draft, "medusa": medusa, "talks": talks,
             "prompts": prompts, "out": tmp_path / "out"}  # fmt: skip
    if case == "a GGUF file":
        names["gguf"] = write_gguf(tmp_path / "tiny.gguf")
    result = domino(*(argument.format(**names) for argument in COMMANDS[case]))
    assert result.exit_code == 1
    (line,) = errors_of(result)
    assert "the drafter does not fit" in line
    assert "made for another target" in line
    assert not (tmp_path / "out").exists()


def test_an_empty_measurement_is_an_error(domino, target, draft, tmp_path):
    """Answers of 8 tokens are too short to count."""
    common = ("--prompts", "chat", "--limit", 2, "-n", 8)
    out = tmp_path / "records.jsonl"
    for command in (("bench", target, "--out", out), ("eval", target, "--draft", draft)):
        for machine in ((), ("--json",)):
            result = domino(*command, *common, *machine)
            assert result.exit_code == 1, result.output
            (line,) = errors_of(result)
            assert "nothing was measured: no prompt counts" in line
            assert not machine or json.loads(result.stdout)
    assert "2 short" in domino("bench", target, "--out", out, *common).stderr
