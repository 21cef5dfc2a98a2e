"""Which files a source names, and the rows inside them."""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.errors import DataError

HUB = "hf:"
ROW_FILES = (".jsonl", ".json", ".ndjson")
TEXT_FILES = (".txt", ".md")
SHARD_FILES = (".npz",)
PROMPT_FILES = (*ROW_FILES, *TEXT_FILES)
_KNOWN = (*PROMPT_FILES, *SHARD_FILES)
_BROKEN = object()
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


class BadRow(Exception):  # noqa: N818
    """A row that is left out; its text is the reason. Readers count it and go on."""


@dataclass
class LeftOut:
    """Rows left out for one reason, and where the first one is: a file and a line or row."""

    count: int
    first: str


class BadRows(dict[str, LeftOut]):
    """Rows left out, by reason."""

    def add(self, reason: str, where: str, count: int = 1) -> None:
        """Count rows of one reason."""
        self.setdefault(reason, LeftOut(0, where)).count += count

    def lines(self) -> list[str]:
        """One line a reason, the most frequent first."""
        order = sorted(self.items(), key=lambda item: -item[1].count)
        return [f"{n.count:,} left out: {reason} (first: {n.first})" for reason, n in order]


@dataclass(frozen=True)
class Place:
    """One thing to read: a file, or a data set of the `datasets` library."""

    path: str
    split: str | None = None
    is_dataset: bool = False

    @property
    def suffix(self) -> str:
        """The kind of file."""
        return "" if self.is_dataset else Path(self.path).suffix.lower()

    @property
    def name(self) -> str:
        """What its rows are called in counts."""
        return self.path if self.is_dataset else Path(self.path).stem


def find_places(source: str | Path, *, kinds: tuple[str, ...] = _KNOWN) -> list[Place]:
    """Everything a source names: a file, a folder, a glob or `hf:name[:split]`."""
    text = str(source)
    if text.startswith(HUB):
        name, _, split = text.removeprefix(HUB).partition(":")
        if not name:
            raise DataError(f"{text!r} names no data set; expected {HUB}name or {HUB}name:split.")
        return [Place(name, split=split or None, is_dataset=True)]
    path = Path(text)
    if path.is_dir():
        if any((path / name).is_file() for name in _SAVED):
            return [Place(text, is_dataset=True)]
        inside = sorted(found for found in path.rglob("*") if _is_data(found, path, kinds))
        if not inside:
            raise DataError(f"the folder {text} holds no data; expected {_listed(kinds)} files.")
        return [Place(str(found)) for found in inside]
    if not path.exists() and glob.has_magic(text):
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207
        if not matches:
            raise DataError(f"nothing matches {text}; check the pattern and where you are.")
        return [place for found in matches for place in find_places(found, kinds=kinds)]
    if not path.exists():
        raise DataError(
            f"there is no {text}; expected a file, a folder, a glob, or {HUB}name for a Hugging "
            "Face data set."
        )
    if path.suffix.lower() not in kinds:
        raise DataError(
            f"{text} is of an unknown kind ({path.suffix or 'no extension'}); expected "
            f"{_listed(kinds)}."
        )
    return [Place(text)]


def read_rows(place: Place, bad: BadRows) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of a JSON file or a data set with where they are; broken ones are counted."""
    rows: Iterable[tuple[int, Any]]
    kind = "row"
    if place.is_dataset:
        rows = enumerate(_open_dataset(place), start=1)
    elif place.suffix == ".json" and (whole := _whole_json(place.path)) is not None:
        rows = enumerate(whole if isinstance(whole, list) else [whole], start=1)
    else:
        kind, rows = "line", _json_lines(place.path)
    for number, row in rows:
        where = f"{place.path}, {kind} {number}"
        if isinstance(row, Mapping):
            yield where, row
        else:
            bad.add(f"it is not {'valid JSON' if row is _BROKEN else 'a JSON object'}", where)


def source_of(row: Mapping[str, Any], place: Place) -> str:
    """What a row says about where it is from, else the name of its file."""
    said = row.get("source")
    return said if isinstance(said, str) and said else place.name


def read_text(path: str | Path) -> str:
    """A whole text file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text; convert it first.") from error


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError:  # UnicodeDecodeError is one too
                        yield number, _BROKEN
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _whole_json(path: str) -> Any | None:
    """The one document of a file, or None if it holds one a line."""
    try:
        return json.loads(read_text(path))
    except ValueError:
        return None


def _open_dataset(place: Place) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"reading {place.path} needs the datasets package; pip install 'domino-spec[train]'."
        ) from error
    try:
        path = Path(place.path)
        if any((path / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(place.path)
        else:
            found = datasets.load_dataset(place.path)
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"the data set {place.path} could not be loaded: {lines[0]}") from error
    if not isinstance(found, dict):
        if place.split not in (None, "train"):
            raise DataError(f"{place.path} has no splits; leave out :{place.split}.")
        return found
    split = place.split or "train"
    if split not in found:
        raise DataError(
            f"{place.path} has no split {split!r}; it has {', '.join(map(str, found))}. Name one: "
            f"{HUB}{place.path}:SPLIT."
        )
    return found[split]


def _is_data(path: Path, folder: Path, kinds: tuple[str, ...]) -> bool:
    # Names with _ or . in front are bookkeeping, of ours or of others.
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    return path.is_file() and path.suffix.lower() in kinds and not hidden


def _listed(kinds: tuple[str, ...]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}" if len(kinds) > 1 else kinds[0]
