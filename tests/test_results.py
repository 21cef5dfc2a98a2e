"""The results pages say what the records say."""

import importlib.machinery
import re
import sys
from collections import Counter

import pytest
from benchmarks import make_results
from benchmarks.results_decoding import TRAINED, head_to_head, serving
from benchmarks.results_engine import changes_table, tilings
from benchmarks.results_exactness import hybrid_loop
from benchmarks.tables import made, made_together, remarks
from benchmarks.time_to_acceptance import NEW, OLD, PICTURE, courses, draw

from domino_spec.checkpoints import describe, released_folder, released_names
from domino_spec.errors import InputError
from domino_spec.records import append_record, environment, read_records
from domino_spec.training.observers import LOG_FILE, read_log
from tests.bench.helpers import made_up
from tests.load.made_up import two_sides


@pytest.fixture(scope="module")
def pages():
    return make_results.pages()


def numbers(text):
    """All numbers of a page's tables, in order."""
    tables = [line for line in text.splitlines() if line.startswith("|")]
    return re.findall(r"\d[\d.,]*", "\n".join(tables))


def test_every_number_in_a_table_comes_from_the_records(pages):
    for path, text in pages.items():
        assert numbers(path.read_text(encoding="utf-8")) == numbers(text), path.name
    files = set(pages) - {make_results.DOCS / "results.md"} | {
        make_results.DOCS / "results" / PICTURE
    }
    assert set((make_results.DOCS / "results").iterdir()) == files


def test_the_picture_shows_every_course_on_record(pages, tmp_path):
    draw(make_results.RECORDS, tmp_path / PICTURE)
    drawn = (tmp_path / PICTURE).read_text(encoding="utf-8")
    found = courses(make_results.RECORDS)
    assert {OLD, NEW} <= {course.recipe for course in found}
    shown = (make_results.DOCS / "results" / PICTURE).read_text(encoding="utf-8")
    assert shown.count("<use ") == drawn.count("<use "), "as many points and ticks"
    for course in found:
        for text in (drawn, shown):
            assert course.recipe in text
            assert course.target in text
    assert f"]({PICTURE})" in pages[make_results.DOCS / "results" / "training.md"]


def test_headlines_are_said_again_at_length_and_their_links_lead_somewhere(pages):
    (short, *details) = pages.values()
    gains = re.findall(r"\d+\.\d+×(?: \([^)]+\))?", short)
    assert len(gains) > 30
    assert [gain for gain in gains if not any(gain in text for text in details)] == []
    links = {make_results.DOCS / link for link in re.findall(r"\]\(([^)#]+)\)", short)}
    assert links == set(pages) - {make_results.DOCS / "results.md"}


def test_the_readmes_speedups_are_among_the_results(pages):
    readme = (make_results.ROOT / "README.md").read_text(encoding="utf-8")
    gains = re.findall(r"\d+\.\d+×", readme)
    assert len(gains) > 3
    assert [gain for gain in gains if gain not in pages[make_results.DOCS / "results.md"]] == []


def test_records_of_different_runs_do_not_share_a_table():
    records = read_records(make_results.RECORDS / "exactness.jsonl")
    other = {**records[0], "environment": {**records[0]["environment"], "commit": "other"}}
    with pytest.raises(ValueError, match="2 different runs"):
        made_together([*records, other])


def test_released_drafters_state_their_runs_last_evaluation():
    stated = {}
    for name in released_names():
        log = read_log(released_folder(f"released:{name}") / LOG_FILE)
        evaluations = [entry["tokens_per_cycle"] for entry in log if "tokens_per_cycle" in entry]
        stated[name] = describe(f"released:{name}").provenance.tokens_per_cycle
        assert stated[name] == (evaluations[-1] if evaluations else None), name
    assert any(stated.values())


def test_exactness_on_record_is_complete_and_clean():
    records = read_records(make_results.RECORDS / "exactness.jsonl")
    assert len(records) == 12
    assert {(r["prompts"], r["new_tokens"]) for r in records} == {(20, 128)}
    assert all(r["differing_prompts"] == 0 for r in records)
    assert not any("+changes" in r["environment"]["commit"] for r in records)


def test_exactness_of_hybrids_on_record_is_complete_and_clean():
    records = read_records(make_results.RECORDS / "exactness-hybrids.jsonl")
    assert {(r["prompts"], r["new_tokens"], r["seeds"]) for r in records} == {(20, 128, 5)}
    assert not any("+changes" in r["environment"]["commit"] for r in records)
    decoded = [r for r in records if "restored" not in r]
    assert Counter(map(hybrid_loop, decoded))["reference loop"] == 12
    on_engine = Counter((r["target"], r["rows"]) for r in decoded if hybrid_loop(r) == "engine")
    assert list(on_engine.values()) == [4] * 4  # every drafter, for two targets and batches
    assert all(r["differing_prompts"] == 0 < r["distinct_tokens"] for r in decoded)
    audits = {(r["target"], r["restored"]): r["bugs"] for r in records if "restored" in r}
    assert len(audits) == 4
    assert {(restored, bugs) for (_, restored), bugs in audits.items()} == {(True, 0), (False, 100)}


def test_every_difference_on_a_gpu_is_a_proven_tie():
    for dtype in ("float32", "bfloat16"):
        records = read_records(make_results.RECORDS / f"gpu_exactness_{dtype}.jsonl")
        assert len(records) == 10
        assert all(r["differing_prompts"] == r["proven_ties"] for r in records)


def test_records_carry_their_circumstances(tmp_path):
    found = environment()
    assert set(found) == {"date", "commit", "command", "hardware", "python", "versions"}
    assert "/" not in found["command"].split()[0]
    append_record(tmp_path / "new" / "r.jsonl", {"a": 1})
    append_record(tmp_path / "new" / "r.jsonl", {"a": 2})
    assert read_records(tmp_path / "new" / "r.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_command_names_no_paths_of_the_machine(monkeypatch):
    monkeypatch.delenv("DOMINO_COMMAND", raising=False)
    monkeypatch.setattr(
        "sys.argv", ["/some/bin/domino", "bench", "/models/smol.gguf", "--x=1", "--out=/a/b.jsonl"]
    )
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert environment()["command"] == "domino bench smol.gguf --x=1 --out=b.jsonl"
    spec = importlib.machinery.ModuleSpec("domino_spec.bench.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert environment()["command"].startswith("python -m domino_spec.bench bench smol.gguf")


def test_a_broken_record_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(InputError, match="line 2"):
        read_records(tmp_path / "r.jsonl")


def test_how_the_compared_drafters_were_trained_is_told(tmp_path):
    (first, *_), found = made_up({"plain": [2.0] * 6}), environment()
    append_record(tmp_path / "head-to-head-cpu.jsonl", first)
    stats = [{"tokens_per_cycle": value} for value in (1.5, 1.75, 2.0, 1.25)]
    common = {"kind": "eagle3", "parameters": 3_400_000, "drafts": 7, "environment": found}
    own = {"learning_rate": 1e-3, "training_seconds": 200.4, "steps": 1234}
    for stage, rate, held_out in (("search", 5e-4, 0), ("search", 1e-3, 1), ("full", 1e-3, 2)):
        record = {**common, **own, "stage": stage, "learning_rate": rate, "packed": stats[2]}
        append_record(tmp_path / TRAINED, {**record, "held_out": stats[held_out]})
    record = {"stage": "full", "kind": "lookup", "held_out": stats[3], "environment": found}
    append_record(tmp_path / TRAINED, record)
    section = head_to_head(tmp_path)
    assert (
        "| EAGLE-3, drafting a chain | 3.4M | 200 | 1,234 | **0.001** (0.0005: 1.50, 0.001: 1.75) "
        "| 7 | 2.00 | 2.00 |" in section
    )
    assert "| prompt lookup | – | – | – | – | – | 1.25 | – |" in section
    assert found["commit"] in section


def test_what_was_tried_is_held_against_what_was_there():
    found = environment()
    change = {
        "shape": "qwen3-4b",
        "change": "another way",
        "timed": ["step", "cycle"],
        "before": [2.0, 4.0],
        "after": [3.0, 1.0],
        "kept": False,
        "in_turns": True,
        "environment": found,
    }

    def cut(warps, times, *, in_use=False):
        return {
            "product": "out",
            "tiling": {"warps": warps},
            "in_use": in_use,
            "microseconds": {"1": times[0], "16": times[1]},
            "environment": found,
        }

    # The tiling in use is timed among the others again: it is not one of them.
    cuts = [cut(4, (4.0, 6.0), in_use=True), cut(4, (3.0, 5.0)), cut(2, (4.0, 8.0))]
    assert "| 1.500 / 0.250 | no |" in changes_table([change])
    assert "| out | 2 | 4.00 | 1.500 |" in tilings([*cuts, cut(8, (9.0, 9.0))])


def test_a_remark_is_made_once_and_only_of_its_commit():
    commits = [{"commit": "one"}, {"commit": "two"}, {"commit": "one"}]
    assert remarks(commits, {"one": "slow", "three": "gone"}) == ["slow"]
    runs = [{"environment": environment()}] * 2
    assert made(runs) == f"- {made_together(runs)}"


def test_the_head_to_head_page_has_what_was_measured(tmp_path):
    for record in made_up({"plain": [2.0] * 6, "fast": [1.0] * 6}, cycles={"fast": 25}):
        append_record(tmp_path / "head-to-head-cpu.jsonl", record)
    section = head_to_head(tmp_path)
    assert "| maths | 0 | 1 | fast | 2.00× | 2.00× | 4.00 | 100.0 | 6 of 6 |" in section
    assert "domino report records/head-to-head-cpu.jsonl" in section


def test_the_server_page_has_what_was_measured(tmp_path):
    for concurrency, times in ((1, (1.0, 2.0)), (8, (2.0, 3.0))):
        names = ("drafts", "plain")
        first, *lines = two_sides([times] * 6, names, concurrency=concurrency, accepted=5)
        for record in [first, *lines] if concurrency == 1 else lines:
            append_record(tmp_path / "serving.jsonl.gz", record)
    section = serving(tmp_path)
    # Two answers of 11 tokens in 1 and in 2 seconds, in 2 and in 3.
    assert "| concurrency 1 | 2.00× | 2.00× | 0.50× |" in section
    assert "| concurrency 8 | 1.50× | 1.50× |" in section


def test_audits_on_record_are_clean_and_as_large_as_promised():
    records = read_records(make_results.RECORDS / "audit.jsonl")
    assert {r["answer"] for r in records} == {"lossless"}
    assert not any(record["greedy"]["bugs"] for record in records if record["greedy"])
    greedy = [record for record in records if record["greedy"] and record["dtype"] == "float32"]
    assert any(r["greedy"]["prompts"] >= 50 and r["new_tokens"] >= 256 for r in greedy)
    assert not any(record["greedy"]["differing_prompts"] for record in greedy)
