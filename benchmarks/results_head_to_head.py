"""The head-to-head's part of the results page."""

from __future__ import annotations

from pathlib import Path

from domino_spec.bench import markdown, read_runs

FILES = "head-to-head*.jsonl"


def head_to_head(records: Path) -> str:
    """All runs on file, made by `domino bench`; nothing where there are none."""
    files = sorted(records.glob(FILES))
    if not files:
        return ""
    return "\n".join(
        [
            "## Head-to-head",
            "",
            "Drafters against plain decoding by `domino bench` ([how](bench.md)); *over plain* is "
            "tokens a second from the prompt to the last token, *decoding alone* leaves the "
            "prompt's reading out. The same records as a page with charts: "
            f"`domino report {' '.join(f'records/{path.name}' for path in files)}`.",
            "",
            markdown(read_runs(files)),
            "",
        ]
    )
