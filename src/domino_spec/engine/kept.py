"""What was measured on this machine, kept in small files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_spec.cache import cache_folder


def kept_file(kind: str, facts: Sequence[Any]) -> Path:
    """Where measurements under these circumstances are kept."""
    digest = hashlib.sha256(json.dumps(list(facts), default=str).encode()).hexdigest()
    return cache_folder() / kind / f"{digest[:24]}.json"


def processor() -> str:
    """The CPU's own name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line for line in lines if line.startswith("model name")), "cpu")


def read_kept(path: Path) -> Any:
    """What a file holds; None if there is none yet, or if it is not ours."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_kept(path: Path, values: Any) -> None:
    """A cache that cannot be written is no reason to stop."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(values), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return


def seconds(value: Any) -> float:
    """A time that somebody could have measured."""
    found = float(value)
    if not (math.isfinite(found) and found > 0):
        raise ValueError(value)
    return found
