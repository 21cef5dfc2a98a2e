from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from domino_spec.checkpoints import Check, Provenance, TargetFacts, check_fit, require_fit
from domino_spec.errors import MismatchError

from .helpers import tiny_config

CONFIG = tiny_config()
KNOWN = Provenance(
    target_id="org/target",
    target_revision="abc",
    tokenizer_sha256="t",
    chat_template_sha256="c",
    thinking="off",
    training_length=32,
)
FACTS = TargetFacts(
    name="org/target",
    revision="abc",
    hidden_size=16,
    vocab_size=48,
    num_layers=8,
    context_length=32,
    tokenizer_sha256="t",
    chat_template_sha256="c",
    thinking="off",
)


def checks(**changes: Any) -> dict[str, Check]:
    return {check.name: check for check in check_fit(CONFIG, KNOWN, replace(FACTS, **changes))}


def test_a_drafter_on_its_own_target() -> None:
    assert {check.verdict for check in checks().values()} == {"ok"}
    assert len(checks()) == 11
    assert require_fit(CONFIG, KNOWN, FACTS) == []


def test_nothing_known_is_never_ok() -> None:
    verdicts = {c.name: c.verdict for c in check_fit(CONFIG, Provenance(), FACTS)}
    structural = {
        "hidden size",
        "vocabulary",
        "target layers",
        "captured hidden states",
        "mask token",
    }
    assert {name for name, verdict in verdicts.items() if verdict == "ok"} == structural
    assert {verdict for name, verdict in verdicts.items() if name not in structural} == {"unknown"}
    assert require_fit(CONFIG, Provenance(), FACTS) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"revision": None}, "target revision"),
        ({"tokenizer_sha256": None}, "tokenizer"),
        ({"chat_template_sha256": None}, "chat template"),
        ({"thinking": None}, "thinking mode"),
        ({"context_length": None}, "training length"),
    ],
)
def test_a_target_that_does_not_say(change: dict[str, Any], name: str) -> None:
    assert checks(**change)[name].verdict == "unknown"
    assert checks(**change)[name].advice == "The target does not say."


@pytest.mark.parametrize(
    ("change", "stated"),
    [
        ({"hidden_size": 32}, "hidden size 16, expected 32"),
        ({"vocab_size": 64}, "vocabulary 48, expected 64"),
        ({"num_layers": 9}, "target layers 8, expected 9"),
        ({"num_layers": 6}, r"captured hidden states \[1, 4, 6\], expected layers 0 to 5"),
    ],
)
def test_structure_that_does_not_fit(change: dict[str, Any], stated: str) -> None:
    with pytest.raises(MismatchError, match=f"does not fit org/target: .*{stated}.*org/target"):
        require_fit(CONFIG, KNOWN, replace(FACTS, **change))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"name": "org/other"}, "target id"),
        ({"revision": "def"}, "target revision"),
        ({"tokenizer_sha256": "u"}, "tokenizer"),
        ({"chat_template_sha256": "d"}, "chat template"),
        ({"thinking": "on"}, "thinking mode"),
        ({"context_length": 16}, "training length"),
    ],
)
def test_other_differences_are_warnings(change: dict[str, Any], name: str) -> None:
    warnings = require_fit(CONFIG, KNOWN, replace(FACTS, **change))
    assert [warning.name for warning in warnings] == [name]
    assert warnings[0].advice
    assert str(warnings[0]).startswith(f"{name}: the drafter has ")


def test_a_mask_token_outside_the_vocabulary() -> None:
    assert checks(vocab_size=47)["mask token"].verdict == "mismatch"


def test_a_local_folder_is_not_compared_with_a_hub_id(tmp_path: Path) -> None:
    assert checks(name=str(tmp_path))["target id"].verdict == "unknown"


def test_a_longer_context_than_the_training() -> None:
    check = checks(context_length=64)["training length"]
    assert (check.verdict, check.found, check.expected) == ("ok", 32, 64)
    assert "Past 32 tokens" in check.advice
