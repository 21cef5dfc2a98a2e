"""The acceptance benchmark: its records, its table, and what it needs."""

import subprocess
import sys

import pytest
from benchmarks import acceptance

from domino_spec.records import read_records
from tests.cli import tiny

OPTIONS = ("--max-new-tokens", 40, "--batch-size", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_target(folder / "target", tokenizer=tiny.make_tokenizer())
    tiny.save_draft(folder / "domino")
    lines = ['{"turns": ["the answer"]}', '{"turns": ["a dog"]}', '{"turns": ["fox"]}']
    (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def run(folder, out, *more):
    acceptance.main(
        [
            str(word)
            for word in (
                "--target", folder / "target", "--draft", folder / "domino", "--sets",
                folder / "quiz.jsonl", "--out", folder / out, *OPTIONS, *more,
            )
        ]
    )  # fmt: skip
    return read_records(folder / out)


def test_one_record_a_set_temperature_and_head(folder, capsys):
    records = run(folder, "decoded.jsonl", "--temperature", 0, 0.7, "--head-off")
    found = [(r["protocol"]["temperature"], r["accept"], r["head"]) for r in records]
    assert found == [
        (0.0, None, True), (0.0, None, False), (0.7, "rejection", True), (0.7, "rejection", False)
    ]  # fmt: skip
    for record in records:
        assert record["target"] == "target, float32"
        assert record["drafter"] == "domino"
        assert record["committed"] == sum(
            tokens
            for tokens, outcome in zip(
                record["per_prompt"]["committed"], record["per_prompt"]["outcome"], strict=True
            )
            if outcome == "used"
        )
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[-5].split()[:3] == ["drafter", "set", "T"]
    assert all(
        f"{record['tokens_per_cycle']:.3f}" in line
        for record, line in zip(records, printed[-4:], strict=True)
    )


def test_simulation_gives_the_same_figures(folder):
    decoded = run(folder, "alone.jsonl", "--batch-size", 1)
    simulated = run(folder, "simulated.jsonl", "--simulate", "--continuations", folder / "kept")
    assert list((folder / "kept").glob("quiz-*.npz"))
    for name in ("tokens_per_cycle", "accepted", "offered", "per_prompt", "used"):
        assert [record[name] for record in decoded] == [record[name] for record in simulated]


@pytest.mark.slow
def test_it_needs_none_of_the_command_lines_packages():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'pydantic']))"
    code = f"{blocked}; import benchmarks.acceptance"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
