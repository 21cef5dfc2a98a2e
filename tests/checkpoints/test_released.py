from __future__ import annotations

from pathlib import Path

import pytest

from domino_spec.checkpoints import (
    describe,
    files,
    load_drafter,
    released_folder,
    released_names,
    save_packed,
)
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import assert_same_drafter, tiny_drafter


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two released drafters, and a folder that is none."""
    for seed, name in enumerate(("small", "large")):
        save_packed(tiny_drafter(seed=seed), tmp_path / name)
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(files, "_ROOT", tmp_path)
    return tmp_path


def test_a_name_is_a_source(shelf: Path) -> None:
    assert released_names() == ["large", "small"]
    assert released_folder("released:small") == shelf / "small"
    checkpoint = load_drafter("released:small")
    assert checkpoint.source == "released:small"
    assert describe("released:small").layout == "packed"
    assert_same_drafter(checkpoint.drafter, load_drafter(shelf / "small").drafter)


@pytest.mark.parametrize("name", ["medium", "notes", "", "../small", "."])
def test_an_unknown_name_lists_what_is_there(name: str, shelf: Path) -> None:
    with pytest.raises(CheckpointError, match="came: released:large, released:small. Give one"):
        load_drafter(f"released:{name}")


def test_an_empty_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_ROOT", tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="came: none yet"):
        load_drafter("released:small")


def test_a_released_drafter_has_no_revisions(shelf: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main'"):
        describe("released:small", revision="main")


def test_what_really_ships_can_be_read() -> None:
    for name in released_names():
        described = describe(f"released:{name}")
        assert described.layout == "packed"
        assert described.provenance.target_id is not None
        assert described.provenance.license is not None
