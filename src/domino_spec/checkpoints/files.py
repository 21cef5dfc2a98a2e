"""A checkpoint's files: a folder, a file, a released name or a hub id, and their headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

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
PREFIX = "released:"
_ROOT = Path(__file__).parent.parent / "released"
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""PyTorch's names of the types that weights are stored in."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_LISTED = 5


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
            f"{source} is not a {WEIGHTS_SUFFIX} file; expected one, with its {CONFIG_FILE} next "
            "to it, or a folder."
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
            "next to them."
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


def released_names() -> list[str]:
    """What ships, in alphabetical order."""
    return sorted(path.parent.name for path in _ROOT.glob(f"*/{CONFIG_FILE}"))


def released_folder(source: str) -> Path:
    """The folder of `released:NAME`."""
    name = source.removeprefix(PREFIX)
    names = released_names()
    if name not in names:
        there = ", ".join(f"{PREFIX}{known}" for known in names) or "none yet"
        raise CheckpointError(
            f"no released drafter is called {name!r}; with this package came: {there}. Give one of "
            "them, or give a folder, a file or a hub id."
        )
    return _ROOT / name


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """One stored tensor, without its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of data in the file."""
        return self.parameters * {**_FLOAT_BYTES, **INTEGER_BYTES}[self.dtype]


@contextmanager
def open_tensors(
    path: Path, *, framework: Literal["pt", "np"] = "pt", device: str = "cpu"
) -> Iterator[Any]:
    """A safetensors file; errors name it. With "np" its header is read without PyTorch."""
    try:
        with safe_open(path, framework=framework, device=device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}); it is damaged or incomplete. "
            "Download it again."
        ) from error


def read_headers(files: CheckpointFiles) -> dict[str, TensorHeader]:
    """Names, shapes and types of all tensors; no data is read."""
    headers: dict[str, TensorHeader] = {}
    for path in files.weights:
        with open_tensors(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in headers:
                    raise CheckpointError(
                        f"tensor {name!r} is in {headers[name].file.name} and in {path.name}; "
                        "expected it once. Remove the file that does not belong here."
                    )
                part = file.get_slice(name)
                headers[name] = TensorHeader(
                    name=name, file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype()
                )
    for name, expected in files.index.items():
        if name not in headers or headers[name].file.name != expected:
            raise CheckpointError(
                f"{INDEX_FILE} places tensor {name!r} in {expected}, which does not hold it; index "
                "and files belong to different checkpoints. Download them again."
            )
    return headers


def listed(items: Sequence[str]) -> str:
    """How many, and the first few of them."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{len(items)} tensor{'s' * (len(items) > 1)}: {'; '.join(items[:_LISTED])}{more}"
