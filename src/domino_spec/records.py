"""Raw records of measurements as JSON lines, and the circumstances each was made under."""

from __future__ import annotations

import datetime
import gzip
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from domino_spec.errors import InputError

_PACKAGES = ("domino-spec", "torch", "transformers", "safetensors")


def environment(*, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """Hardware, versions, commit, command and date, as every record carries them.

    `secrets` are left out of the command.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "command": _command(secrets),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def hardware() -> str:
    """The accelerator, or the processor with its architecture and the threads in use."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{_processor()} ({platform.machine()}), {torch.get_num_threads()} threads"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "CPU"


def _commit() -> str:
    """The checked-out commit, marked when tracked files differ from it.

    DOMINO_COMMIT names it where there is no checkout.
    """
    if os.environ.get("DOMINO_COMMIT"):
        return os.environ["DOMINO_COMMIT"]
    here = Path(__file__).parent
    try:
        commit = _git("rev-parse", "--short=12", "HEAD", cwd=here)
        return commit + ("+changes" if _git("status", "--porcelain", "-uno", cwd=here) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str, cwd: Path) -> str:
    done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _command(secrets: Sequence[str]) -> str:
    """How to run it again, without the machine's own paths."""
    if os.environ.get("DOMINO_COMMAND"):
        return os.environ["DOMINO_COMMAND"]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = Path(sys.argv[0]).name
    if spec is not None:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    words = sys.argv[1:]
    for secret in secrets:
        words = [word.replace(secret, "***") for word in words]
    return " ".join([program, *map(_without_folders, words)])


def _without_folders(word: str) -> str:
    """A word of a command line, or what follows its `=`, without the machine's folders."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _open(path: Path, mode: str) -> TextIO:
    opened = (gzip.open if path.suffix == ".gz" else open)(path, mode, encoding="utf-8")
    return cast("TextIO", opened)


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one record to a file, packed if its name ends in .gz, making the folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open(path, "at") as file:
        file.write(json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a file; a broken line is an error that names it."""
    try:
        with _open(Path(path), "rt") as file:
            text = file.read()
    except OSError as error:
        raise InputError(
            f"the records {path} cannot be read: {error.strerror or error}."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"the records {path} are not UTF-8 text.") from error
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not a JSON record: {error}.") from error
    return records
