from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.audit import greedy, sampling
from domino_spec.decoding import loop
from domino_spec.records import read_records
from tests.audit.test_greedy import accepts_one_too_many

QUICK = ("--limit", 3, "--tokens", 12, "--samples", 40, "--sampled-prompts", 1, "--positions", 3)


@pytest.mark.parametrize("engine", ["reference", "fast"])
def test_a_lossless_pair_exits_with_0_and_is_recorded(domino, target, draft, tmp_path, engine):
    out = tmp_path / "records.jsonl"
    run = domino("audit", target, "--draft", draft, *QUICK, "--engine", engine, "--out", out)
    assert run.exit_code == 0, run.output
    assert "0 differ" in run.stdout
    assert "total variation" in run.stdout
    assert "lossless" in run.stdout
    (record,) = read_records(out)
    assert record["answer"] == "lossless"
    assert record["engine"] == engine
    assert record["greedy"]["tokens"] > 0
    assert record["sampling"]["accept"] == "block"
    assert record["environment"]["commit"]
    assert "/" not in record["target"]


def test_a_bug_exits_with_1_and_every_difference_is_listed(domino, target, draft, monkeypatch):
    def wrong(sequence, logits, tree, drawn_from, argmax):
        path = accepts_one_too_many(sequence, logits, tree, drawn_from, argmax)
        if len(tree.tokens) > 1 and not path:
            sequence.output[-1] = tree.tokens[1]
        return path

    monkeypatch.setattr(loop, "_walk", wrong)
    given = ("audit", target, "--draft", draft, *QUICK, "--samples", 0, "--engine", "reference")
    people = domino(*given)
    assert people.exit_code == 1
    assert "greedy tokens that no rounding explains" in people.stdout
    machine = domino(*given, "--json")
    assert machine.exit_code == 1
    values = json.loads(machine.stdout)
    assert values["answer"] == "bug"
    first = values["greedy"]["differences"][0]
    names = {"prompt", "position", "plain", "found", "gap", "bound", "verdict", "why"}
    assert set(first) == names
    assert first["gap"] > first["bound"]


@pytest.mark.parametrize("stopped", ["second prompt", "sampling"])
def test_an_interrupted_audit_keeps_what_was_compared(
    domino, target, draft, tmp_path, monkeypatch, stopped
):
    follow = greedy._follow

    def interrupted(*arguments):
        if stopped == "sampling" or arguments[2] == 0:
            return follow(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(greedy, "_follow", interrupted)
    if stopped == "sampling":
        monkeypatch.setattr(sampling, "_conditionals", Mock(side_effect=KeyboardInterrupt))
    out = tmp_path / "records.jsonl"
    run = domino("audit", target, "--draft", draft, *QUICK, "--out", out)
    assert run.exit_code == 130, run.output
    assert "acceptance length" in run.stdout
    assert "cannot tell; interrupted" in run.stdout
    (record,) = read_records(out)
    assert record["greedy"]["prompts"] == (3 if stopped == "sampling" else 1)
    assert (record["answer"], record["sampling"]) == ("unclear", None)


@pytest.mark.parametrize("kind", ["medusa", "lookup:2"])
def test_any_kind_of_drafter_is_audited(domino, target, medusa, tmp_path, kind):
    draft = medusa if kind == "medusa" else kind
    given = ("audit", target, "--draft", draft, *QUICK, "--tokens", 24, "--samples", 20)
    given += ("--positions", 6)  # long enough for a lookup to find something
    for engine, accept in (("auto", "block"), ("reference", "rejection")):
        run = domino(*given, "--engine", engine, "--accept", accept, "--json")
        assert run.exit_code == 0, run.output
        values = json.loads(run.stdout)
        ran = "fast" if engine == "auto" else engine
        assert (values["engine"], values["drafter"]) == (ran, kind)
        assert (values["kind"], values["sampling"]["accept"]) == (kind.split(":")[0], accept)
        assert sum(values["greedy"]["offered"]) > 0, "something was drafted"


def test_auto_audits_the_loop_that_would_decode(domino, target, draft, monkeypatch):
    given = ("audit", target, "--draft", draft, *QUICK)
    engine = json.loads(domino(*given, "--json").stdout)
    assert (engine["engine"], engine["sampling"]["accept"]) == ("fast", "block")
    rule = json.loads(domino(*given, "--accept", "match", "--json").stdout)
    assert (rule["engine"], rule["sampling"]["accept"]) == ("fast", "match")
    refusing = "it is of an unknown family"
    monkeypatch.setattr(DominoDecoder, "unsupported_reason", lambda _: refusing)
    assert json.loads(domino(*given, "--json").stdout)["engine"] == "reference"
    refused = domino(*given, "--engine", "fast")
    assert refused.exit_code == 2
    assert refusing in " ".join(refused.output.split())


def test_built_in_prompts_and_those_from_a_file(domino, target, draft, tmp_path):
    path = tmp_path / "quiz.jsonl"
    path.write_text('{"turns": ["what is the answer"]}\n{"turns": ["the lazy dog"]}\n')
    run = domino("audit", target, "--draft", draft, "--prompts", path, *QUICK, "--json")
    values = json.loads(run.stdout)
    assert (values["prompts"], values["greedy"]["prompts"]) == ("quiz", 2)
    run = domino("audit", target, "--draft", draft, "--prompts", "maths", *QUICK, "--json")
    assert json.loads(run.stdout)["prompts"] == "maths"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option '--draft'"),
        (("--draft", "nowhere"), "nowhere"),
        (("--depth", 0, "--samples", 0), "nothing was drafted"),
        (("--limit", 0, "--samples", 0), "nothing was audited"),
    ],
)
def test_what_cannot_be_told_exits_with_2(domino, target, draft, arguments, words):
    given = () if not arguments or "--draft" in arguments else ("--draft", draft)
    run = domino("audit", target, *given, *QUICK, *arguments)
    assert run.exit_code == 2, run.output
    assert words in " ".join(run.output.split())
