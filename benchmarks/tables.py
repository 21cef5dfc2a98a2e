"""Tables of the results page, and the line that says how their records were made."""

from __future__ import annotations

from typing import Any


def circumstances(records: list[dict[str, Any]]) -> str:
    """One line on how a set of records was made; they must have been made together."""
    lines = {
        f"`{e['command']}`, commit {e['commit']}, {e['hardware']}, Python {e['python']}, "
        f"torch {e['versions']['torch']}, transformers {e['versions']['transformers']}, "
        f"{e['date']}."
        for e in (record["environment"] for record in records)
    }
    if len(lines) != 1:
        raise ValueError(f"records of {len(lines)} different runs in one table: {sorted(lines)}")
    return lines.pop()


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])
