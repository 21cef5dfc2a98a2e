from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from domino_spec.cli import train as train_module
from domino_spec.cli.command import Voice
from domino_spec.errors import TrainingError
from domino_spec.training.observers import read_log
from tests.cli import tiny
from tests.training.helpers import bigram_corpus, loaded_bigrams, ready

TINY = ("--length", 64, "--batch-size", 2, "--anchors", 4, "--size", "small")
FAST = (*TINY, "--eval-every", 0, "--no-tensorboard")


def lines(result):
    """Every line of stdout is JSON as the standard has it."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in result.stdout.splitlines()]


def one_error(result) -> str:
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_from_conversations_to_a_drafter_that_decodes(
    train, domino, target, talks, curves, tmp_path
):
    layers = ("--target-layer-ids", 0, "--target-layer-ids", 2)
    result = train(
        *TINY, *layers, "--steps", 8, "--log-every", 7, "--eval-every", 4, "--save-every", 0
    )
    assert result.exit_code == 0, result.output
    drafter = tmp_path / "run" / "drafter"
    told = f"the drafter is in {drafter}; acceptance length, held out: 1."
    assert result.stdout.startswith(told)
    assert "with the head off" in result.stdout
    for part in (
        "domino drafter: 0.1M parameters, 2 layers, ",
        "hidden states of target layers 0, 2, blocks of 16",
        "30 conversations, ",
        f"warning: 1 left out: it is not valid JSON (first: {talks}, line 31)",
        "8 steps of 2 sequences × 64 tokens, 4 blocks a sequence, soft labels, learning rate 0.003",
        "\n8 steps, 1,024 tokens, ",
        " epochs\n",
        f"all settings: {tmp_path / 'run' / 'config.yaml'}",
        "step 6/8: 0:0",
        "step 7/8: loss ",
        "accuracy by draft |",
        "conversations a second",
        " left\n",
        "step 8/8: acceptance length, held out 1.",
        "learnt next to nothing",
        f"try it: domino generate {target} --draft {drafter} -p 'Once upon a time'",
    ):
        assert part in result.stderr, part
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["layers"], saved["gru_hidden_dim"], saved["mask_token_id"]) == (2, 64, tiny.MASK)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoints", "config.yaml", "curves.png", "log.jsonl", "tensorboard"} < names

    def document(*arguments):
        answer = domino(*arguments, "--json")
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    told = document("info", drafter, "--target", target)
    assert told["kind"] == "domino"
    assert told["fit"]["verdict"] != "mismatch"
    assert told["provenance"]["tokenizer_sha256"]
    plain, fast = (
        document("generate", target, "what is", "-n", 12, *flags)["generations"][0]["tokens"]
        for flags in ((), ("--draft", drafter))
    )
    assert plain == fast
    (found,) = document(
        "eval", target, "--draft", drafter, "--data", talks, "--held-out", 3, "-n", 40
    )["measurements"]
    assert found["tokens_per_cycle"] >= 1
    assert document("export", drafter, tmp_path / "public")["layout"] == "public"
    assert document("info", tmp_path / "public")["kind"] == "domino"


@pytest.mark.parametrize("variant", ["dflash", "markov"])
def test_machines_get_json_lines_and_files_give_settings(train, target, talks, tmp_path, variant):
    file = tmp_path / "run.yaml"
    settings = {
        "variant": variant,
        "layers": 1,
        "steps": 9,
        "learning_rate": "1e-3",
        "log_every": 1,
    }
    file.write_text(yaml.safe_dump({**settings, "target": target, "data": str(talks)}))
    result = train("--config", file, *FAST, "--steps", 2, "--set", "clip=0.5", "--json", basics=())
    assert result.exit_code == 0, result.output
    first, *reports, last = lines(result)
    config = first["config"]
    assert (config["variant"], config["steps"], config["clip"]) == (variant, 2, 0.5)
    assert config["learning_rate"] == 0.001
    assert first["data"]["conversations"] == 30
    assert first["first_step"] == 0
    assert (first["plan"]["steps"], first["plan"]["tokens"]) == (2, 2 * 2 * 64)
    assert [report["step"] for report in reports] == [1, 2]
    assert reports[0]["loss"] > 0
    assert len(reports[0]["accuracy"]) == 16
    assert last["finished"]
    assert last["drafter"] == str(tmp_path / "run" / "drafter")
    assert last["resume"] is last["signal"] is last["tokens_per_cycle"] is None
    assert "1 left out" in last["warnings"][0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_resuming_needs_no_settings(train, signalled, tmp_path, number):
    signalled(number)
    few = (*FAST, "--limit", 12, "--epochs", 2, "--log-every", 1, "--lr", 0.01)
    stopped = train(*few)
    assert stopped.exit_code == 128 + number, stopped.output
    again = f"domino train --out {tmp_path / 'run'} --resume"
    assert stopped.stdout.startswith("stopped at step 1 of ")
    assert stopped.stdout.endswith(f"; resume with: {again}\n")
    assert not (tmp_path / "run" / "drafter").exists()

    refused = train("--resume", "--lr", 0.5, basics=())
    assert "learning_rate was 0.01 and is 0.5" in one_error(refused)
    resumed = train("--resume", "--no-tensorboard", "--log-every", 1, "--json", basics=())
    assert resumed.exit_code == 0, resumed.output
    first, *_, last = lines(resumed)
    assert first["first_step"] == 1
    assert first["config"]["learning_rate"] == 0.01
    assert last["finished"]
    steps = [report["step"] for report in read_log(tmp_path / "run" / "log.jsonl")]
    assert steps == list(range(1, last["step"] + 1))
    # The same command once more with --resume: nothing is left to do, nothing contradicts.
    done = train(*few, "--resume")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"the drafter is in {tmp_path / 'run' / 'drafter'}\n"


def test_machines_are_told_how_to_go_on(train, signalled):
    signalled(signal.SIGTERM)
    result = train(*FAST, "--steps", 3, "--log-every", 1, "--json")
    assert result.exit_code == 143
    last = lines(result)[-1]
    assert (last["finished"], last["step"], last["drafter"]) == (False, 1, None)
    assert last["resume"].endswith("--resume")


def test_quiet_says_where_the_drafter_is(train, tmp_path):
    result = train(*FAST, "--steps", 1, "-q", "--limit", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"the drafter is in {tmp_path / 'run' / 'drafter'}\n"
    assert result.stderr == ""


def test_nothing_held_out_is_said(train):
    result = train(*TINY, "--no-tensorboard", "--steps", 1, "--limit", 9)
    assert result.exit_code == 0, result.output
    assert "the acceptance length is not measured: nothing could be held out" in result.stderr


CASES = {
    "nothing": ([], "needs TARGET, --data and --out; give them"),
    "no data": (["{target}", "--out", "{out}"], "needs --data; give it"),
    "no folder": (["{target}", "--data", "{talks}"], "needs --out; give it"),
    "unknown setting": (
        ["{all}", "--set", "colour=red"],
        "no setting --set colour; docs/training.md",
    ),
    "no setting": (["{all}", "--set", "colour"], "expected name=value"),
    "no file": (["{all}", "--config", "gone.yaml"], "gone.yaml cannot be read"),
    "no target": (["gone", "--data", "{talks}", "--out", "{out}"], "no model at gone"),
    "data gone": (["{target}", "--data", "gone.jsonl", "--out", "{out}"], "there is no gone.jsonl"),
    "no number": (
        ["{all}", "--set", "steps=many"],
        "--set steps is 'many'; it should be a valid number",
    ),
    "negative": (
        ["{all}", "--steps", "-1"],
        "--steps is -1; it should be greater than or equal to 1",
    ),
    "both": (["{all}", "--steps", "3", "--epochs", "1"], "--steps and --epochs contradict"),
    "headless rank": (
        ["{all}", "--variant", "dflash", "--rank", "8"],
        "dflash drafters have no --rank",
    ),
    "device": (["{all}", "--device", "gpu"], "device is 'gpu'"),
    "a file in the way": (
        ["{target}", "--data", "{talks}", "--out", "{talks}"],
        "talks.jsonl is a file; expected a folder",
    ),
    "a file further up": (
        ["{target}", "--data", "{talks}", "--out", "{talks}/run"],
        "talks.jsonl is a file; expected a folder",
    ),
    "no run": (["--out", "{out}", "--resume"], "holds no run to resume"),
    "no folder of a run": (["--resume"], "give --out"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line_and_leaves_nothing(case, domino, target, talks, tmp_path):
    arguments, expected = CASES[case]
    names = {"target": target, "talks": talks, "out": tmp_path / "out"}
    everything = ["{target}", "--data", "{talks}", "--out", "{out}"]
    filled = [
        part.format(**names)
        for argument in arguments
        for part in (everything if argument == "{all}" else [argument])
    ]
    assert expected in one_error(domino("train", *filled))
    machine = domino("train", *filled, "--json")
    assert expected in lines(machine)[-1]["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_run_is_not_trained_into(train):
    assert train(*FAST, "--steps", 1, "-q").exit_code == 0
    assert "already holds a run at step 1; resume it" in one_error(train(*FAST, "--steps", 1))


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("tensorboard", "or train with --no-tensorboard"),
        ("yaml", "PyYAML is not installed"),
    ],
)
def test_what_is_not_installed_is_named_first(train, monkeypatch, missing, expected):
    def found(name):
        return None if name == missing else importlib.util.find_spec(name)

    monkeypatch.setattr(train_module, "find_spec", found)
    line = one_error(train("--steps", 1))
    assert expected in line
    assert "pip install 'domino-spec[train]'" in line


def test_full_memory_is_explained():
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    expected = pytest.raises(TrainingError, match="CUDA out of memory.*Halve --batch-size")
    with expected, train_module.explaining_memory():
        raise full


def gathered(tmp_path, assignments=(), file=None, **flags):
    path = None
    if file is not None:
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(file))
    basics = {"target": "t", "data": ["d"], "out": "o"}
    return train_module.gather(
        {**basics, **flags}, config=path, assignments=assignments, resume=False
    )


def test_flags_win_over_files_and_set_over_flags(tmp_path):
    file = {"target": "other", "steps": 5, "gamma": 3.0, "target_layer_ids": [1, 2], "clip": 2.0}
    values, given_as = gathered(
        tmp_path,
        file={**file, "rows": 8},  # as older runs wrote it
        **{"captured_layers": 3, "size": "large", "epochs": 2.0, "gamma": 4.0, "batch_size": 2},
        assignments=["gamma=5", "betas=[0.9, 0.99]"],
    )
    assert values == {
        "target": "t", "data": ["d"], "out": "o", "captured_layers": 3, "size": "large",
        "epochs": 2.0, "gamma": 5, "betas": [0.9, 0.99], "clip": 2.0, "batch_size": 2,
    }  # fmt: skip
    named = [given_as[name] for name in ("target", "clip", "epochs", "gamma")]
    assert named == ["TARGET", f"clip in {tmp_path / 'settings.yaml'}", "--epochs", "--set gamma"]


def test_unset_flags_say_nothing(tmp_path):
    assert gathered(tmp_path, file={"steps": 5, "epochs": None})[0]["steps"] == 5
    assert set(gathered(tmp_path)[0]) == {"target", "data", "out"}


def test_every_setting_is_a_flag_of_its_type(train, target, talks, tmp_path):
    result = train(
        *FAST, "--steps", 1, "--json", "--betas", 0.8, 0.9, "--no-shift-label",
        "--target-layer-ids", 0, "--target-layer-ids", 2, "--compile", "off",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = lines(result)[0]["config"]
    assert config["betas"] == [0.8, 0.9]
    assert config["target_layer_ids"] == [0, 2]
    assert (config["shift_label"], config["compile"]) == (False, "off")
    assert config["data"] == [str(talks)]


def test_help_explains_every_option_without_torch():
    script = (
        "import sys\nfrom domino_spec.cli.main import app\n"
        "try:\n    app(['train', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr
    assert "[TARGET]" in done.stdout
    options = [line.strip("│ ") for line in done.stdout.splitlines() if line.startswith("│ --")]
    assert len(options) > 30
    silent = [line for line in options if line.endswith(">")]  # nothing behind the type
    assert not silent


@pytest.mark.slow
def test_of_several_processes_the_first_speaks(target, talks, tmp_path):
    command = [
        "-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "domino_spec", "train", target,
        "--data", talks, "--out", tmp_path / "run", *TINY, "--steps", 2, "--log-every", 1,
        "--no-tensorboard", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    first, *reports, last = lines(done)
    assert first["config"]["steps"] == 2
    assert [report["step"] for report in reports] == [1, 2]
    assert last["finished"]
    assert done.stderr.count("1 left out") == 1
    assert "several processes share the drafter" in done.stderr
    assert (tmp_path / "run" / "drafter" / "model.safetensors").exists()


def test_a_compiled_run_says_why_its_first_step_takes_long(tmp_path, capsys):
    run = ready(tmp_path / "run", bigram_corpus(tmp_path), loaded_bigrams())
    for acceleration, said in ((None, False), (object(), True)):
        train_module.introduce(
            Voice(), dataclasses.replace(run, acceleration=acceleration), alone=True
        )
        assert ("waits for the compiler" in capsys.readouterr().err) is said
