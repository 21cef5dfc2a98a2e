"""The cache folder, and measurements of this machine that are kept in it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_VARIABLE = "DOMINO_CACHE"


def cache_folder() -> Path:
    """$DOMINO_CACHE, else the user's own cache folder."""
    if os.environ.get(_VARIABLE):
        return Path(os.environ[_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "domino-spec"


def measurement_file(kind: str, facts: Sequence[Any]) -> Path:
    """The file that holds measurements made under these conditions."""
    digest = hashlib.sha256(json.dumps(list(facts), default=str).encode()).hexdigest()
    return cache_folder() / kind / f"{digest[:24]}.json"


def processor() -> str:
    """The CPU's own name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line for line in lines if line.startswith("model name")), "cpu")


def read_measurement(path: Path) -> Any:
    """What a file holds; None if it does not exist or cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_measurement(path: Path, values: Any) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return


def seconds(value: Any) -> float:
    """A measured time: finite and positive."""
    found = float(value)
    if not (math.isfinite(found) and found > 0):
        raise ValueError(value)
    return found
