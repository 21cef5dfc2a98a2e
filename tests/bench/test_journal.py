"""A killed run goes on where it was; what could change a figure starts another file."""

import json
import shutil
from pathlib import Path

import pytest

from domino_spec.bench.journal import Journal
from domino_spec.bench.runner import measure
from domino_spec.bench.summary import read_runs, summarise
from domino_spec.errors import InputError
from domino_spec.records import environment, read_records
from tests.bench.helpers import facts, hopeless, journal_of, make_run, prompt_set

QUICK = {"repeats": 1, "warm_up": 0}
SETS = [prompt_set("first"), prompt_set("second", numbers=(0, 2, 5))]


class Killed(Exception):
    pass


def killer(after):
    """Ends a run after so many units."""
    left = iter(range(after - 1, -1, -1))

    def progress(cell, done, total):
        if not next(left):
            raise Killed

    return progress


def shape_of(records):
    """Everything but the clock: which prompts, in which order, with which counts."""
    kept = []
    for record in records:
        methods = {
            name: [(row["sha256"], row["cycles"], row["accepted"]) for row in found["rows"]]
            for name, found in record.get("methods", {}).items()
            if record["record"] == "unit"
        }
        kept.append((record["record"], record.get("cell"), record.get("unit"),
                     record.get("units"), record.get("order"), methods))  # fmt: skip
    return kept


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run that nothing stopped, and its journal."""
    run = make_run(sets=SETS, **QUICK)
    journal = journal_of(run, tmp_path_factory.mktemp("whole") / "whole.jsonl")
    measure(run, journal)
    return run, journal


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The file of a run with the default settings."""
    run, path = make_run(), tmp_path_factory.mktemp("finished") / "r.jsonl"
    measure(run, journal_of(run, path))
    return path


@pytest.fixture
def path(finished, tmp_path):
    """A copy of that file."""
    return Path(shutil.copy(finished, tmp_path))


@pytest.mark.parametrize("after", [1, 5, 6, 8])  # in a cell, between cells, at the end
def test_a_killed_run_goes_on_where_it_was(after, whole_run, tmp_path):
    whole, expected = whole_run
    path = tmp_path / "killed.jsonl"
    with pytest.raises(Killed):
        measure(make_run(sets=SETS, **QUICK), journal_of(whole, path), progress=killer(after))
    before = path.read_bytes()
    resumed = make_run(sets=SETS, **QUICK)
    ran = []
    honest = resumed.path.run

    def counting(method, batch, params):
        ran.append([prompt.number for prompt in batch])
        return honest(method, batch, params)

    resumed.path.run = counting
    journal = journal_of(resumed, path)
    measure(resumed, journal)
    assert path.read_bytes().startswith(before)  # what was done stays as it was
    assert shape_of(journal.records) == shape_of(expected.records)
    assert shape_of(journal.records) == shape_of(
        [json.loads(line) for line in path.read_text().splitlines()]
    )
    if after == 8:
        assert ran == []


def test_a_line_that_was_never_finished_is_measured_again(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:50])
    run = make_run()
    journal = journal_of(run, path)
    measure(run, journal)
    assert shape_of(journal.records)[-1][2] == 4
    assert len(path.read_text().splitlines()) == len(lines)
    assert read_runs([path])[0].cells[0].units == 5


def test_another_temperature_joins_the_file(path):
    more = make_run(temperatures=(0.0, 0.7))
    said = []
    measure(more, journal_of(more, path), say=said.append)
    assert not any("T 0," in words for words in said)
    assert [cell.cell.temperature for cell in read_runs([path])[0].cells] == [0.0, 0.7]


def other_target(run):
    return {"target": {**facts(run)["target"], "fingerprint": "other weights"}}


@pytest.mark.parametrize(
    ("settings", "change", "named"),
    [
        ({"repeats": 3}, None, "settings repeats"),
        ({"max_new_tokens": 11}, None, "settings max_new_tokens"),
        ({"methods": [hopeless()]}, None, "methods"),
        ({}, other_target, "target fingerprint"),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_alone(settings, change, named, path):
    before = path.read_bytes()
    other = make_run(**settings)
    with pytest.raises(InputError, match=f"another run: what differs is {named}"):
        measure(other, journal_of(other, path, **(change(other) if change else {})))
    assert path.read_bytes() == before


def test_another_machine_is_another_run(path, monkeypatch):
    other = {**environment(), "hardware": "another machine"}
    monkeypatch.setattr("domino_spec.bench.journal.environment", lambda: other)
    with pytest.raises(InputError, match="machine hardware"):
        journal_of(make_run(), path).open()


def test_other_prompts_of_the_same_name_are_refused(path):
    other = make_run(sets=[prompt_set(numbers=(0, 1))])
    with pytest.raises(InputError, match="other prompts of the name count"):
        measure(other, journal_of(other, path))


def test_a_file_of_its_own_is_found_again(tmp_path):
    run = make_run()
    one, same = (Journal(tmp_path, facts(run), stem="bigram") for _ in range(2))
    other = Journal(tmp_path, facts(run, system="Be brief."), stem="bigram")
    assert one.path == same.path != other.path
    assert one.path.name == f"bench-bigram-{one.key[:8]}.jsonl"


@pytest.mark.parametrize("text", ['{"a": 1}\n', "[1]\n", "no json\n"])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"r\.jsonl"):
        journal_of(make_run(), path).open()
    assert path.read_text() == text


def test_records_without_their_first_line_are_refused(path):
    with pytest.raises(InputError, match="without its first line"):
        summarise(read_records(path)[1:])
    with pytest.raises(InputError, match="given twice"):
        read_runs([path, path])
