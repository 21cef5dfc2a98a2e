from __future__ import annotations

import json

import pytest
import torch

from domino_spec import evaluation
from domino_spec.data.shards import write_shard
from domino_spec.records import read_records
from tests.cli import tiny

NEW = 40


def document(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("sets") / "quiz.jsonl"
    turns = ["what is the answer", "the lazy dog", "jumps over", "fox " * 120]
    lines = [json.dumps({"turns": [turn, "and then?"]}) for turn in turns]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_simulated_and_decoded_agree(domino, target, draft, prompts):
    arguments = ("eval", target, "--draft", draft, "--prompts", prompts, "-n", NEW, "--json")
    (simulated,) = document(domino(*arguments))["measurements"]
    (decoded,) = document(domino(*arguments, "--decode", "--batch-size", 1))["measurements"]
    assert simulated["way"] == "simulated"
    assert decoded["way"] == "decoded"
    assert simulated["too_long"] == 1
    assert simulated["used"] > 0
    same = ("tokens_per_cycle", "accepted", "offered", "used", "loops", "short", "too_long")
    assert [simulated[name] for name in same] == [decoded[name] for name in same]
    assert simulated["drafter"] == "domino"
    assert "/" not in simulated["target"]


def test_the_table_has_a_line_a_drafter_and_set(
    domino, target, draft, dflash, prompts, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")  # a narrow terminal folds the headings
    other = tmp_path / "other.jsonl"
    other.write_text('{"turns": ["the quick brown fox"]}\n', encoding="utf-8")
    result = domino(
        "eval", target, "--draft", draft, "--draft", dflash, "--prompts", prompts, "--prompts",
        other, "-n", NEW, "--out", tmp_path / "r.jsonl",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:4] == ["drafter", "set", "acceptance", "length"]
    named = [["domino", "quiz"], ["dflash", "quiz"], ["domino", "other"], ["dflash", "other"]]
    assert [line[:2] for line in lines[1:]] == named
    records = read_records(tmp_path / "r.jsonl")
    assert [[record["drafter"], record["set"]] for record in records] == named
    assert all(
        f"{r['tokens_per_cycle']:.2f}" == line[2]
        for r, line in zip(records, lines[1:], strict=True)
    )
    assert {"date", "commit", "command"} <= set(records[0]["environment"])
    assert len(records[0]["per_prompt"]["cycles"]) == 3


def test_an_interrupted_run_shows_what_was_measured(
    domino, target, draft, dflash, prompts, monkeypatch
):
    simulated = evaluation.measure_simulated
    answers = []

    def interrupted(*arguments, **options):
        if answers:
            raise KeyboardInterrupt
        answers.append(simulated(*arguments, **options))
        return answers[0]

    monkeypatch.setattr(evaluation, "measure_simulated", interrupted)
    arguments = ("eval", target, "--draft", draft, "--draft", dflash, "--prompts", prompts)
    run = domino(*arguments, "-n", NEW)
    assert run.exit_code == 130, run.output
    (line,) = [line.split() for line in run.stdout.splitlines() if "quiz" in line]
    assert line[:3] == ["domino", "quiz", f"{answers[0].total.tokens_per_cycle:.2f}"]
    assert "interrupted" in run.stderr
    none = domino(*arguments, "-n", NEW)
    assert (none.exit_code, none.stdout) == (130, "")


def test_options_reach_the_measurement(domino, target, draft, prompts):
    (found,) = document(
        domino("eval", target, "--draft", draft, "--prompts", prompts, "-n", NEW, "--json",
               "--decode", "-t", 0.7, "--seed", 3, "--depth", 3, "--candidates", 4, "--no-head",
               "--limit", 2, "--batch-size", 2, "--accept", "rejection", "--draft-window", 9,
               "--draft-sinks", 2)
    )["measurements"]  # fmt: skip
    assert (found["depth"], found["candidates"], found["head"]) == (3, 4, False)
    assert found["window"] == [9, 2]
    assert found["accept"] == "rejection"
    assert found["protocol"]["temperature"] == 0.7
    assert found["protocol"]["seed"] == 3
    assert found["per_prompt"]["number"] == [0, 1]
    assert len(found["accepted"]) <= 3


def test_prompts_are_what_the_other_commands_take(domino, target, draft):
    arguments = ("eval", target, "--draft", draft, "--prompts", "maths", "--limit", 2, "-n", NEW)
    (found,) = document(domino(*arguments, "--json"))["measurements"]
    assert (found["set"], found["used"] + found["loops"] + found["short"]) == ("maths", 2)


def test_a_drawn_simulation_says_what_it_counts(domino, target, draft, prompts):
    arguments = ("eval", target, "--draft", draft, "--prompts", prompts, "-n", NEW, "-t", 0.7)
    assert "match rule" in domino(*arguments).stderr
    (found,) = document(domino(*arguments, "--json"))["measurements"]
    assert found["accept"] == "match"


def test_continuations_are_kept(domino, target, draft, prompts, tmp_path):
    arguments = ("eval", target, "--draft", draft, "--prompts", prompts, "-n", NEW, "--json",
                 "--continuations", tmp_path)  # fmt: skip
    first = document(domino(*arguments))["measurements"][0]
    (path,) = tmp_path.glob("quiz-*.npz")
    changed = path.stat().st_mtime_ns
    again = document(domino(*arguments))["measurements"][0]
    assert path.stat().st_mtime_ns == changed
    assert first["accepted"] == again["accepted"]


def test_prompts_from_a_corpus(domino, target, draft, tmp_path):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(5, tiny.VOCAB, (20, 8), generator=generator).tolist()
    write_shard(
        tmp_path / "part-0.npz", prompts=texts, answers=[[7, 8, 0]] * 20, vocab_size=tiny.VOCAB
    )
    arguments = ("eval", target, "--draft", draft, "--data", tmp_path / "part-0.npz", "-n", NEW)
    (found,) = document(domino(*arguments, "--json", "--limit", 4))["measurements"]
    assert found["set"] == "data"
    assert found["per_prompt"]["number"] == [0, 1, 2, 3]
    (found,) = document(domino(*arguments, "--json", "--held-out", 5))["measurements"]  # of 20
    assert len(found["per_prompt"]["number"]) == 2, "as training does: at most a tenth"


def test_what_makes_no_sense_is_said_at_once(domino, target, draft, prompts, tmp_path):
    none = domino("eval", target, "--draft", draft)
    assert none.exit_code == 2
    assert "--prompts FILE" in none.stderr.replace("\n", " ")
    split = domino("eval", target, "--draft", draft, "--prompts", prompts, "--held-out", 3)
    assert split.exit_code == 2
    gone = domino("eval", target, "--draft", draft, "--prompts", tmp_path / "gone.jsonl")
    assert gone.exit_code == 1
    assert "gone.jsonl; expected a file" in " ".join(gone.stderr.split())
    assert "loading target" not in gone.stderr
    deep = domino("eval", target, "--draft", draft, "--prompts", prompts, "--depth", 99)
    assert deep.exit_code == 1
    assert "depth is 99" in deep.stderr
    assert "loading target" not in deep.stderr


def test_drafters_of_every_kind_are_measured_side_by_side(domino, target, draft, medusa, prompts):
    arguments = ["eval", target, "--prompts", prompts, "-n", NEW, "--decode", "--batch-size", 2]
    for drafter in (draft, medusa, "lookup:4", "plain"):
        arguments += ["--draft", drafter]
    found = document(domino(*arguments, "--json"))["measurements"]
    assert [m["drafter"] for m in found] == ["domino", "medusa", "lookup:4", "plain"]
    assert [m["depth"] for m in found] == [7, 3, 4, 0]
    assert [m["head"] for m in found] == [True, None, None, None]
    assert found[-1]["tokens_per_cycle"] == 1.0
    answers = [m["per_prompt"]["outcome"] for m in found]
    assert answers.count(answers[0]) == 4, "all are exact"


def test_a_baseline_is_not_simulated_and_says_so_first(domino, target, medusa, prompts):
    arguments = ("eval", target, "--draft", medusa, "--prompts", prompts, "-n", NEW)
    for more in ((), ("--decode", "--no-head")):
        result = domino(*arguments, *more)
        assert result.exit_code == 1
        assert "--decode" in result.stderr
        assert "loading target" not in result.stderr
    deep = domino(*arguments, "--decode", "--depth", 9)
    assert deep.exit_code == 1
    assert "medusa drafter gives 0 to 3" in deep.stderr.replace("\n", " ")
