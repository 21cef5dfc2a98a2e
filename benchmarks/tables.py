"""Tables of the results page, and the line that says how their records were made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from domino_spec.bench.tables import circumstances as one_run


def circumstances(records: list[dict[str, Any]]) -> str:
    """One line on how a set of records was made; they must have been made together."""
    lines = {one_run(record["environment"]) for record in records}
    if len(lines) != 1:
        raise ValueError(f"records of {len(lines)} different runs in one table: {sorted(lines)}")
    return lines.pop()


def remarks(environments: Iterable[dict[str, Any]], said: dict[str, str]) -> list[str]:
    """What is to be said of runs, by the commits that they were made at; each once."""
    commits = dict.fromkeys(environment["commit"] for environment in environments)
    return [f"{said[commit]}\n" for commit in commits if commit in said]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])
