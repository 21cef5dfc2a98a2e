"""Markdown for the results pages, and how the records of a table were made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str]]
NONE = "–"


def page(*parts: str) -> str:
    """Paragraphs, tables and headings, with an empty line between them; empty ones left out."""
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def table(columns: Columns, entries: Iterable[Any]) -> str:
    """A Markdown table: a column for each function, a line for each entry."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[show(entry) for show in columns.values()] for entry in entries]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def made(records: Iterable[Record]) -> str:
    """The runs that records come from, each once: command, commit, hardware, versions, date."""
    return "\n".join(f"- {line}" for line in dict.fromkeys(map(_run, records)))


def made_together(records: Iterable[Record]) -> str:
    """The one run that all of a table's records come from."""
    lines = dict.fromkeys(map(_run, records))
    if len(lines) != 1:
        raise ValueError(f"records of {len(lines)} different runs in one table: {sorted(lines)}")
    return next(iter(lines))


def measured(environment: Record) -> str:
    """Where, at which commit and when, in a table's cell."""
    return ", ".join(str(environment[name]) for name in ("hardware", "commit", "date"))


def _run(record: Record) -> str:
    found = record["environment"]
    versions = found["versions"]
    return (
        f"`{found['command']}`, commit {found['commit']}, {found['hardware']}, Python "
        f"{found['python']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"{found['date']}."
    )


def remarks(environments: Iterable[Record], said: Mapping[str, str]) -> list[str]:
    """What there is to say about runs at certain commits, each once."""
    commits = dict.fromkeys(environment["commit"] for environment in environments)
    return [said[commit] for commit in commits if commit in said]


def field(name: str, form: str = "", unit: str = "", *, scale: float = 1) -> Callable[[Any], str]:
    """A column that shows one field of a record, as in `batches.0.rows`."""

    def show(record: Any) -> str:
        for key in name.split("."):
            record = record[int(key) if isinstance(record, list) else key]
        return format(record if scale == 1 else record * scale, form) + unit

    return show


_ALSO = {"SmolLM2-135M-Instruct.Q4_1": "smollm2"}


def recipe_target(run: Record) -> str:
    """The target of a run of the recipe; the first ones name it in their command alone."""
    named = re.search(r"--target (\S+)", run["environment"]["command"])
    name = Path(run.get("target") or (named[1] if named else "")).name.removesuffix(".gguf")
    return _ALSO.get(name, name)
