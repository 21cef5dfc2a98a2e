from __future__ import annotations

import json

import pytest

from domino_spec.decoding import Row
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
    assert record["sampling"]["accept"] == ("coupled" if engine == "fast" else "rejection")
    assert record["environment"]["commit"]
    assert "/" not in record["target"]


def test_a_bug_exits_with_1_and_every_difference_is_listed(domino, target, draft, monkeypatch):
    def wrong(self, logits, drafts, drawn_from=None, argmax=None):
        accepted = accepts_one_too_many(self, logits, drafts, drawn_from, argmax)
        if drafts and not accepted:
            self.generated[-1] = drafts[0]
        return accepted

    monkeypatch.setattr(Row, "commit_block", wrong)
    greedy = ("audit", target, "--draft", draft, *QUICK, "--samples", 0)
    people = domino(*greedy)
    assert people.exit_code == 1
    assert "greedy tokens that no rounding explains" in people.stdout
    machine = domino(*greedy, "--json")
    assert machine.exit_code == 1
    values = json.loads(machine.stdout)
    assert values["answer"] == "bug"
    first = values["greedy"]["differences"][0]
    names = {"prompt", "position", "plain", "found", "gap", "bound", "verdict", "why"}
    assert set(first) == names
    assert first["gap"] > first["bound"]


def test_prompts_from_a_file(domino, target, draft, tmp_path):
    path = tmp_path / "quiz.jsonl"
    path.write_text('{"turns": ["what is the answer"]}\n{"turns": ["the lazy dog"]}\n')
    run = domino("audit", target, "--draft", draft, "--prompts", path, *QUICK, "--json")
    values = json.loads(run.stdout)
    assert (values["prompts"], values["greedy"]["prompts"]) == ("quiz", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --draft"),
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
