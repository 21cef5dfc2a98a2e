"""`--against llama.cpp`, against fakes: the same prompts and counts, in turns, never a failure."""

import json
import os
import urllib.request
from pathlib import Path

import pytest
import torch

from domino_spec.bench import runner
from domino_spec.bench.llama_cpp import OpenedModel, find_against
from domino_spec.bench.runner import measure
from domino_spec.bench.settings import BenchSettings
from domino_spec.bench.summary import summarise
from domino_spec.bench.tables import HEADS, how_measured, method_rows, taking_part_rows
from domino_spec.errors import InputError
from domino_spec.report import caveats
from domino_spec.targets import load_target
from tests.bench import fake_llama
from tests.bench.helpers import facts, journal_of, make_run, prompt_set
from tests.cli import tiny

CPU = {"device": "cpu"}


def found_for(*against, target="tiny.gguf", load=CPU, **settings):
    return find_against(BenchSettings(target=str(target), against=against, **settings), load)


def opening(path="tiny.gguf", capacity=40):
    return OpenedModel(path=Path(path), device=torch.device("cpu"), threads=3, capacity=capacity)


def measured(found, tmp_path, *, numbers=(0, 1)):
    """Records of a run of plain decoding, a drafter and `found`."""
    run = make_run(against=[found], sets=[prompt_set(numbers=numbers)], warm_up=0)
    recorded = [*facts(run)["methods"], found.recorded(3)]
    journal = journal_of(run, tmp_path / "r.jsonl", methods=recorded)
    with found.opened(opening()):
        measure(run, journal)
    return journal.records


def test_the_package_answers_the_same_prompts_by_as_many_tokens(tmp_path, monkeypatch):
    llama = fake_llama.package(monkeypatch)
    (found,) = found_for("llama.cpp")
    records = measured(found, tmp_path, numbers=(0, 1, 2))
    (opened,) = llama.opened
    given = {"model_path": "tiny.gguf", "n_ctx": 40, "n_threads": 3, "n_threads_batch": 3,
             "n_gpu_layers": 0, "offload_kqv": False, "flash_attn": True,
             "verbose": False}  # fmt: skip
    assert opened.options == given
    assert opened.closed
    units = [record for record in records if record["record"] == "unit"]
    asked = {tuple(prompt) for prompt in opened.prompts}
    assert asked == {(1 + n, 5 + n, 9 + n)[: 1 + n % 3] for n in range(3)}
    for unit in units:
        assert {*unit["order"][0]} == {"plain", "knowing", "llama.cpp"}
        assert unit["order"][0][1:] + unit["order"][0][:1] == unit["order"][1]
        plain, other = (unit["methods"][name] for name in ("plain", "llama.cpp"))
        assert [row["tokens"] for row in other["rows"]] == [row["tokens"] for row in plain["rows"]]
        assert other["cycles"] == other["rows"][0]["committed"] == plain["rows"][0]["tokens"] - 1
        for whole, prefill in zip(other["seconds"], other["prefill"], strict=True):
            assert 0 < prefill < whole
    # Its texts are told, and are no failure.
    (run,) = summarise(records)
    line = run.cells[0].line("llama.cpp")
    assert (line.same, line.compared) == (0, 3)
    row = next(row for row in method_rows(run) if "llama.cpp" in row)
    assert row[HEADS.index("same text")] == "0 of 3"
    assert row[HEADS.index("speedup")].endswith("×")
    assert not any("differ from plain" in caveat for caveat in caveats(run))
    assert "llama.cpp (llama-cpp-python 9.9 with SSE3, AVX2, threads: 3)" in how_measured(run)
    assert "another implementation" in [row[1] for row in taking_part_rows(run)]


def test_drafts_of_its_prompt_lookup_are_counted(monkeypatch, tmp_path):
    llama = fake_llama.package(monkeypatch)
    plain, found = found_for("llama.cpp", "llama.cpp+lookup:3")
    assert (plain.name, found.name) == ("llama.cpp", "llama.cpp+lookup:3")
    records = measured(found, tmp_path)
    assert llama.opened[0].options["n_ctx"] == 43
    rows = [u["methods"][found.name]["rows"][0] for u in records if u["record"] == "unit"]
    # The prefill's token, then cycles of four.
    assert [row["cycles"] for row in rows] == [-(-row["committed"] // 4) for row in rows]


def test_a_whole_run_on_a_file(tmp_path, monkeypatch):
    llama = fake_llama.package(monkeypatch)
    path = tmp_path / "tiny.gguf"
    folder = tiny.save_target(tmp_path / "unpacked", tokenizer=tiny.make_tokenizer())
    monkeypatch.setattr(runner, "load_target", lambda _, **given: load_target(folder, **given))
    settings = BenchSettings(
        target=str(path), against=("llama.cpp",), prompts=("chat",), limit=2, max_new_tokens=8,
        shortest_answer=2, repeats=1, out=tmp_path / "r.jsonl",
    )  # fmt: skip
    said = []
    summary, _ = runner.run_bench(settings, say=said.append, load=CPU)
    assert summary.methods == ["plain", "llama.cpp"]
    assert summary.facts["methods"][1]["settings"]["threads"] == torch.get_num_threads()
    (opened,) = llama.opened
    assert opened.options["model_path"] == str(path)
    assert opened.closed
    assert any("would tokenise 2 of 2 prompts otherwise" in line for line in said)


def test_a_server_is_timed_by_its_own_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for this machine's own addresses
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxies of its first use
    with fake_llama.serving() as server:
        (found,) = found_for(f"llama.cpp={server.url}/")
        records = measured(found, tmp_path)
        assert found.tokenize("4 2") == [4, 2]
    asked = [body for body in server.bodies if "prompt" in body]
    assert {(b["temperature"], b["cache_prompt"], b["ignore_eos"]) for b in asked} == {
        (0.0, False, True)
    }
    unit = next(record for record in records if record["record"] == "unit")
    other, plain = unit["methods"]["llama.cpp"], unit["methods"]["plain"]
    assert other["seconds"] == [1.75, 1.75]
    assert other["prefill"] == [0.25, 0.25]
    assert other["rows"][0]["tokens"] == plain["rows"][0]["tokens"]
    assert other["cycles"] == other["rows"][0]["committed"] - fake_llama.DRAFTS_TAKEN
    settings = records[0]["facts"]["methods"][-1]["settings"]
    assert settings == {"by": "llama-server at an address", "version": "b9-fake",
                        "threads": "its own"}  # fmt: skip


def test_a_server_that_does_something_else_is_refused(tmp_path):
    with (
        fake_llama.serving(model="other.gguf") as server,
        pytest.raises(InputError, match=r"serves other.gguf; expected tiny.gguf"),
    ):
        found_for(f"llama.cpp={server.url}")
    with fake_llama.serving(extra_prompt_tokens=1) as server:
        (found,) = found_for(f"llama.cpp={server.url}")
        with pytest.raises(InputError, match="read 3 tokens of a prompt of 2"):
            found.answer([1, 2], 4)
    with fake_llama.serving(context=20) as server:
        (found,) = found_for(f"llama.cpp={server.url}")
        with pytest.raises(InputError, match="--ctx-size 40"), found.opened(opening()):
            pass
    with pytest.raises(InputError, match="no llama-server answers"):
        found_for(f"llama.cpp={server.url}")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The only folder of PATH, and no package."""
    fake_llama.no_package(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_server_on_the_path_is_started_and_stopped(path, monkeypatch):
    fake_llama.program(path)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "64")
    (found,) = found_for("llama.cpp")
    assert found.settings(3) == {"by": "llama-server", "version": "7 (fake)", "threads": 3}
    with found.opened(opening(path / "tiny.gguf")):
        assert found.answer([1, 2], 4).output == [3, 4, 5, 6]
        called = json.loads((path / "tiny.gguf.called").read_text())
        words = " ".join(called["words"])
    for expected in ("--ctx-size 40", "--threads 3", "--threads-batch 3", "--device none",
                     "--parallel 1"):  # fmt: skip
        assert expected in words
    assert "LLAMA_ARG_THREADS" not in called["environ"]
    with pytest.raises(ProcessLookupError):
        os.kill(called["pid"], 0)


def test_a_server_without_a_gpu_is_refused_for_a_target_on_one(path):
    fake_llama.program(path)
    with pytest.raises(InputError, match="finds no GPU"):
        found_for("llama.cpp", load={"device": "cuda"})


def test_a_server_that_cannot_open_the_file_says_why(path):
    fake_llama.program(path)
    (found,) = found_for("llama.cpp")
    with (
        pytest.raises(InputError, match="unknown model architecture"),
        found.opened(opening(path / "broken.gguf")),
    ):
        pass


def test_what_is_missing_is_said_before_the_target_is_loaded(path, monkeypatch):
    monkeypatch.setattr(runner, "load_target", None)
    (path / "llama-cli").write_text("#!/bin/sh\n")
    (path / "llama-cli").chmod(0o755)
    settings = BenchSettings(target="tiny.gguf", against=("llama.cpp",), prompts=("chat",))
    words = r"package llama_cpp.* and llama-server on PATH.*llama-cli is.*pip install llama-cpp-py"
    with pytest.raises(InputError, match=words):
        runner.run_bench(settings, load=CPU)


@pytest.mark.parametrize(
    ("against", "given", "words"),
    [
        (("llama.cpp",), {"target": "a/folder"}, "expected a GGUF file"),
        (("llama.cpp",), {"temperature": (0.0, 0.7)}, "expected temperature 0"),
        (("llama.cpp",), {"batch_size": (2,)}, "batch size 1"),
        (("llama.cpp",), {"load": {"device": "cpu", "device_map": "auto"}}, "device map auto"),
        (("llama.cpp",), {"load": {"device": "mps"}}, "expected one CPU or CUDA device"),
        (("vllm",), {}, r"expected llama.cpp or llama.cpp\+lookup"),
        (("llama.cpp+eagle",), {}, r"expected llama.cpp or llama.cpp\+lookup"),
        (("llama.cpp+lookup=http://127.0.0.1:1",), {}, "was set when it was started"),
        (("llama.cpp=no-such-program",), {}, "the program no-such-program"),
        (("llama.cpp", "llama.cpp"), {}, "given twice"),
        (("llama.cpp",), {"load": {"device": "cuda"}}, "built for CPUs alone"),
    ],
)
def test_what_cannot_be_compared_is_refused(monkeypatch, against, given, words):
    fake_llama.package(monkeypatch)
    with pytest.raises(InputError, match=words):
        found_for(*against, **given)
