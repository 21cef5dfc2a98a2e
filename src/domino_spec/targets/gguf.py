"""GGUF targets as Transformers folders: converted once, then taken from the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError

from domino_spec import __version__
from domino_spec.cache import cache_folder
from domino_spec.errors import Notice

_MANIFEST = "conversion.json"
_SAMPLE = 1 << 20
_ABANDONED_AFTER = 24 * 3600.0
_not_kept: set[Path] = set()


class ConversionNotice(Notice):
    """A GGUF file is converted, or its conversion cannot be kept."""


def converted(path: Path, convert: Callable[[Path], None]) -> Path | None:
    """The folder that `convert` made of a GGUF file, now or at an earlier start.

    None where the cache cannot be written. Several processes may convert at once: each writes a
    folder of its own, and the first to finish gives the entry its name.
    """
    entry = _entry(path)
    if _is_whole(entry):
        return entry
    if entry in _not_kept:
        return None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    except OSError as error:
        _tell_not_kept(path, entry, error)
        return None
    _tell(f"converting {path.name} for Transformers: done once, then kept in {entry.parent}.")
    try:
        convert(staging)
        digests = {file.name: _digest(file) for file in staging.iterdir()}
        (staging / _MANIFEST).write_text(json.dumps(digests), encoding="utf-8")
        _give_name(staging, entry)
    except (OSError, SafetensorError) as error:
        _tell_not_kept(path, entry, error)
        return None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _remove_outdated(entry)
    return entry


def _entry(path: Path) -> Path:
    """Named after the file, its path, its contents and what converts it."""
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    contents = hashlib.sha256(f"{path.stat().st_mtime_ns} {_digest(path)}".encode()).hexdigest()
    by = hashlib.sha256(f"{version('transformers')} {__version__}".encode()).hexdigest()[:8]
    return cache_folder() / "gguf" / f"{path.stem}-{place}-{contents[:16]}-{by}"


def _digest(path: Path) -> str:
    """Of a file's size, its head and its tail: whole files would take as long as loading them."""
    size = path.stat().st_size
    seen = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        seen.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        seen.update(file.read(_SAMPLE))
    return seen.hexdigest()


def _is_whole(entry: Path) -> bool:
    """Whether every file is as it was written; entries appear whole, but disks get cleaned up."""
    try:
        digests = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_digest(entry / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _give_name(staging: Path, entry: Path) -> None:
    """Rename, unless another process was first; a damaged entry makes way."""
    if _is_whole(entry):
        return
    if entry.exists():
        damaged = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        entry.rename(damaged / entry.name)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        staging.rename(entry)
    except OSError:
        if not _is_whole(entry):
            raise


def _remove_outdated(entry: Path) -> None:
    """Conversions of what the file held before, and what killed processes left."""
    file, contents, _ = entry.name.rsplit("-", 2)
    for other in entry.parent.iterdir():
        outdated = other.name.startswith(f"{file}-") and f"-{contents}-" not in other.name
        if other.name.startswith(f".{file}-"):
            outdated = _age(other) > _ABANDONED_AFTER
        if outdated:
            shutil.rmtree(other, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _tell_not_kept(path: Path, entry: Path, error: Exception) -> None:
    _not_kept.add(entry)
    reason = getattr(error, "strerror", None) or str(error)
    _tell(
        f"the conversion of {path.name} cannot be kept in {entry.parent} ({reason}), so every "
        "start repeats it; make room there, or set DOMINO_CACHE to another folder."
    )


def _tell(message: str) -> None:
    warnings.warn(message, ConversionNotice, stacklevel=2)
