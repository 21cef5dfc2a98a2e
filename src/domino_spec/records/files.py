"""Records as JSON lines, one measurement a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one record to a file, making the folder if need be."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a file; a broken line is an error that names it."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not a JSON record: {error}.") from error
    return records
