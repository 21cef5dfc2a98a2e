from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from domino_spec.checkpoints import load_drafter, save_drafter, save_packed
from domino_spec.checkpoints import write as writing
from domino_spec.errors import CheckpointError, ConfigError

from .helpers import assert_same_drafter, tiny_drafter


class Crash(Exception):
    pass


def crash(*_args: Any, **_kwargs: Any) -> None:
    raise Crash


@pytest.mark.parametrize("step", ["save_file", "write_json", "_sync", "_keep_other_files"])
@pytest.mark.parametrize("save", [save_drafter, save_packed])
def test_a_crash_while_writing_leaves_the_old_checkpoint(
    save: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_drafter(seed=0), tiny_drafter(seed=1)
    folder = save_drafter(old, tmp_path / "drafter")
    monkeypatch.setattr(writing, step, crash)
    with pytest.raises(Crash):
        save(new, folder)
    assert_same_drafter(load_drafter(folder).drafter, old)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


@pytest.mark.parametrize("shard", [2, 3])
def test_a_crash_between_shards_leaves_the_old_checkpoint(
    shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_drafter(seed=0)
    folder = save_drafter(old, tmp_path / "drafter", max_shard_bytes=4000)
    written, save_file = [], writing.save_file

    def save_some(part: Any, path: Path, **options: Any) -> None:
        written.append(path)
        if len(written) == shard:
            raise Crash
        save_file(part, path, **options)

    monkeypatch.setattr(writing, "save_file", save_some)
    with pytest.raises(Crash):
        save_drafter(tiny_drafter(seed=1), folder, max_shard_bytes=4000)
    assert_same_drafter(load_drafter(folder).drafter, old)


def test_a_failed_swap_puts_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny_drafter(seed=0)
    folder = save_drafter(old, tmp_path / "drafter")
    rename = Path.rename

    def rename_old_only(self: Path, target: Path) -> Path:
        if ".saving-" in self.name:
            raise Crash
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_old_only)
    with pytest.raises(Crash):
        save_drafter(tiny_drafter(seed=1), folder)
    assert_same_drafter(load_drafter(folder).drafter, old)


def test_a_kill_inside_the_swap_leaves_a_whole_checkpoint_that_the_error_names(
    tmp_path: Path,
) -> None:
    old = tiny_drafter()
    folder = save_drafter(old, tmp_path / "drafter")
    left = folder.rename(tmp_path / ".drafter.previous-1234abcd")
    with pytest.raises(CheckpointError, match=r"rename \.drafter\.previous-1234abcd to drafter"):
        load_drafter(str(folder))
    assert_same_drafter(load_drafter(left).drafter, old)


def test_a_new_checkpoint_replaces_all_of_the_old_one(tmp_path: Path) -> None:
    folder = save_drafter(tiny_drafter(seed=0), tmp_path / "drafter", max_shard_bytes=4000)
    new = tiny_drafter(seed=1, head=None, shift_label=False)
    assert save_drafter(new, folder) == folder
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_same_drafter(load_drafter(folder).drafter, new)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_other_files_are_kept(tmp_path: Path) -> None:
    folder = save_drafter(tiny_drafter(seed=0), tmp_path / "drafter")
    (folder / "README.md").write_text("read me")
    nested = save_drafter(tiny_drafter(seed=2), folder / "step-100")
    (folder / "latest").symlink_to("step-100")
    with (folder / "log.txt").open("w") as log:
        log.write("before\n")
        save_drafter(tiny_drafter(seed=1), folder)
        log.write("after\n")
    assert (folder / "README.md").read_text() == "read me"
    assert (folder / "log.txt").read_text() == "before\nafter\n"
    assert (folder / "latest").readlink() == Path("step-100")
    assert_same_drafter(load_drafter(nested).drafter, tiny_drafter(seed=2))
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter(seed=1))


def test_other_files_are_kept_where_links_are_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    (folder / "LICENSE").write_text("free")

    def no_links(*_args: Any, **_kwargs: Any) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", no_links)
    save_drafter(tiny_drafter(), folder)
    assert (folder / "LICENSE").read_text() == "free"


def test_a_loaded_drafter_can_be_saved_over_its_own_files(tmp_path: Path) -> None:
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    loaded = load_drafter(folder).drafter
    save_drafter(loaded, folder)
    assert_same_drafter(load_drafter(folder).drafter, tiny_drafter())
    assert_same_drafter(loaded, tiny_drafter())


def test_parents_are_made_and_files_refused(tmp_path: Path) -> None:
    save_drafter(tiny_drafter(), tmp_path / "a" / "b" / "drafter")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save_drafter(tiny_drafter(), tmp_path / "file")
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        save_drafter(tiny_drafter(), tmp_path / "drafter", max_shard_bytes=0)


def test_the_folder_is_readable_as_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode
