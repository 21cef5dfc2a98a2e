"""Data sets of the `datasets` library, which is optional."""

from __future__ import annotations

import sys
import types

import pytest

from domino_spec.errors import DataError
from tests.data.test_sources import GOOD, lines, load


@pytest.fixture
def library(monkeypatch):
    """A stand-in with the two functions that are called."""
    calls = []
    rows = [GOOD, {"messages": []}]

    def load_dataset(name):
        calls.append(name)
        if name == "gone":
            raise FileNotFoundError("Dataset 'gone' doesn't exist\nmore")
        return {"train": rows, "test": rows * 2}

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    module.load_from_disk = lambda path: calls.append(path) or rows
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_splits_of_a_named_set(library):
    assert load("hf:some/set").report.bad["it is empty"].first == "some/set, row 2"
    assert len(load("hf:some/set:test")) == 2
    assert library == ["some/set", "some/set"]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        load("hf:some/set:dev")


def test_a_saved_folder_is_recognised(library, tmp_path):
    lines(tmp_path / "state.json", {})
    lines(tmp_path / "data.jsonl", "not read")
    assert len(load(tmp_path)) == len(load(f"hf:{tmp_path}")) == 1
    assert library == [str(tmp_path)] * 2
    with pytest.raises(DataError, match="has no splits"):
        load(f"hf:{tmp_path}:test")


def test_what_the_library_cannot_find_is_one_line(library):
    with pytest.raises(DataError, match="gone could not be loaded: Dataset 'gone' doesn't exist$"):
        load("hf:gone")


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'domino-spec\[train\]'"):
        load("hf:some/set")


def test_the_real_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([GOOD, GOOD])
    data.save_to_disk(str(tmp_path / "saved"))
    assert len(load(tmp_path / "saved")) == 2
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "dict"))
    assert len(load(f"hf:{tmp_path / 'dict'}:test")) == 2
    (tmp_path / "plain").mkdir()
    lines(tmp_path / "plain" / "a.jsonl", GOOD)
    assert len(load(f"hf:{tmp_path / 'plain'}")) == 1
