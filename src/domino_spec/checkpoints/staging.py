"""Replacing a checkpoint folder whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from domino_spec.checkpoints.locate import CONFIG_FILE, INDEX_FILE, PREVIOUS_MARK, WEIGHTS_SUFFIX
from domino_spec.errors import CheckpointError


def checked_folder(folder: str | Path) -> Path:
    """The full path of a folder to save into; a file of that name is refused."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected the name of a folder to save into.")
    return folder


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its name in the end.

    An interruption leaves the old checkpoint; other files in the folder are kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(folder, ".saving-")
    staging.mkdir()
    try:
        yield staging
        for path in staging.iterdir():
            _sync(path)
        if folder.exists():
            _keep_other_files(folder, staging)
        _sync(staging)
        _take_name(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file as people like to read it."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _keep_other_files(old: Path, new: Path) -> None:
    """Link what is no part of the checkpoint (a licence, logs, nested runs) into its successor."""

    def replaced(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != old:
            return set()
        own = {CONFIG_FILE, INDEX_FILE}
        return {name for name in names if name in own or name.endswith(WEIGHTS_SUFFIX)}

    shutil.copytree(
        old, new, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True
    )


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def _take_name(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        _sync(folder.parent)
        return
    previous = _sibling(folder, PREVIOUS_MARK)
    folder.rename(previous)
    try:
        staging.rename(folder)
    except BaseException:
        previous.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sibling(folder: Path, mark: str) -> Path:
    return folder.with_name(f".{folder.name}{mark}{uuid4().hex[:8]}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
