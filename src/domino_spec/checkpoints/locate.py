"""Where a checkpoint's files are: a folder, a file, a released name, or an id on the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from domino_spec.checkpoints.released import PREFIX, released_folder
from domino_spec.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_SUFFIX = ".safetensors"
PREVIOUS_MARK = ".previous-"
"""Between a folder's name and a random end: the old checkpoint while a new one takes its place."""

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_PATTERNS = ["*.json", "*.safetensors", "LICENSE*", "README.md"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The files of one checkpoint. Nothing has been read from the weights yet."""

    source: str
    config: Path
    weights: tuple[Path, ...]
    index: Mapping[str, str] = field(default_factory=dict)
    """File of each tensor as a sharded checkpoint's index states it."""
    revision: str | None = None
    """The commit of a checkpoint that came from the hub."""

    def read_config(self) -> dict[str, Any]:
        """The parsed config.json."""
        return _read_json(self.config)


def locate(source: str | Path, *, revision: str | None = None) -> CheckpointFiles:
    """Find a checkpoint; a hub id is downloaded unless it is in the cache."""
    released = isinstance(source, str) and source.startswith(PREFIX)
    path = released_folder(str(source)) if released else Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} was asked for, but {source} is on this disk and has no "
                "revisions. Leave it out, or give a hub id."
            )
        if path.is_file():
            return _single_file(path, str(source))
        return _folder(path, str(source))
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        folder = _download(source, revision)
        return _folder(folder, source, revision=folder.name)
    raise CheckpointError(
        f"{source} is no file or folder here, and not a hub id of the form org/name. "
        f"{_interrupted_save(path)}Check the path; drafters that came with this package are called "
        f"{PREFIX}NAME."
    )


def _download(hub_id: str, revision: str | None) -> Path:
    at = f" at revision {revision!r}" if revision else ""
    try:
        return _snapshot(hub_id, revision)
    except Exception as error:  # of whichever HTTP stack the hub's client uses
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(
            f"{hub_id} is no file or folder here, and the hub gave no {hub_id}{at} "
            f"({type(error).__name__}: {reason}). Check the spelling and your access, download it "
            "while online, or give the path of a local copy."
        ) from error


def _snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    fetch = partial(snapshot_download, hub_id, revision=revision, allow_patterns=_HUB_PATTERNS)
    try:
        return Path(fetch())
    except OfflineModeIsEnabled:
        # Some clients ask the hub about a pinned commit even when its files are all here.
        return Path(fetch(local_files_only=True))


def _single_file(path: Path, source: str) -> CheckpointFiles:
    if path.suffix in _PICKLE_SUFFIXES:
        raise _pickled([path.name])
    if path.suffix != WEIGHTS_SUFFIX:
        raise CheckpointError(
            f"{source} is not a {WEIGHTS_SUFFIX} file; expected one, with its {CONFIG_FILE} beside "
            "it, or a folder."
        )
    return CheckpointFiles(source=source, config=_config_in(path.parent), weights=(path,))


def _folder(folder: Path, source: str, *, revision: str | None = None) -> CheckpointFiles:
    index_path = folder / INDEX_FILE
    index: dict[str, str] = {}
    if index_path.is_file():
        index = _read_index(index_path)
        weights = [folder / name for name in sorted(set(index.values()))]
        if (folder / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in index.values():
            raise CheckpointError(
                f"{source} holds both {WEIGHTS_FILE} and {INDEX_FILE}, which may differ; remove "
                "the one that is out of date."
            )
    else:
        weights = _unsharded(folder, source)
    return CheckpointFiles(
        source=source,
        config=_config_in(folder),
        weights=tuple(weights),
        index=index,
        revision=revision,
    )


def _unsharded(folder: Path, source: str) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    names = sorted(path.name for path in folder.iterdir())
    found = [name for name in names if name.endswith(WEIGHTS_SUFFIX)]
    if len(found) == 1:
        return [folder / found[0]]
    if found:
        raise CheckpointError(
            f"{source} holds {', '.join(found)} without {INDEX_FILE}; expected the index, or a "
            "single file. Give the path of the one to load."
        )
    pickled = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickled:
        raise _pickled(pickled)
    raise CheckpointError(
        f"{source} holds no {WEIGHTS_FILE}; found {', '.join(names) or 'nothing'}. Check the path, "
        "or download the checkpoint again."
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path.name} has no weight_map from tensors to files; download it again."
        )
    for tensor, name in weight_map.items():
        # Only plain names: the hub's cache is made of links, so resolved paths prove nothing.
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or name == "..":
            raise CheckpointError(
                f"{path.name} places tensor {tensor!r} in {name!r}, outside the checkpoint's "
                "folder; expected a plain file name. Do not trust this checkpoint."
            )
        if not name.endswith(WEIGHTS_SUFFIX):
            raise CheckpointError(
                f"{path.name} places tensor {tensor!r} in {name!r}; expected a {WEIGHTS_SUFFIX} "
                "file, since nothing else is opened."
            )
    missing = sorted({n for n in weight_map.values() if not (path.parent / n).is_file()})
    if missing:
        raise CheckpointError(
            f"{path.name} names {', '.join(missing)}, which is missing; download it again."
        )
    return weight_map


def _config_in(folder: Path) -> Path:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}, which says how to read the weights; expected it "
            "beside them."
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); download it again or correct it."
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}; expected a JSON object.")
    return values


def _pickled(names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(names)}: pickled weights are never unpickled, since that can run any code. "
        f"Convert them to {WEIGHTS_SUFFIX} first."
    )


def _interrupted_save(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    left = sorted(p.name for p in path.parent.glob(f".{path.name}{PREVIOUS_MARK}*"))
    if not left:
        return ""
    return f"A save was interrupted: rename {left[-1]} to {path.name} to have the old one back. "
