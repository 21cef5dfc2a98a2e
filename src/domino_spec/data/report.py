"""What was read, what was left out, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 8


class BadRow(Exception):  # noqa: N818
    """A row that is left out; its text is the reason. Readers count it and go on."""


@dataclass(frozen=True)
class BadRows:
    """Rows left out for one reason."""

    count: int
    first: str
    """Where the first one is: a file and a line or row."""


@dataclass(frozen=True)
class DataReport:
    """Counts of a corpus. `bad` rows are those of the reading, which a split does not divide."""

    conversations: int
    tokens: int
    supervised_tokens: int
    cut: int = 0
    """Conversations longer than the maximum length, kept up to it."""
    unlearnt_turns: int = 0
    """Assistant turns that the chat template rewrites later on: kept, but not learnt."""
    sources: Mapping[str, int] = field(default_factory=dict)
    bad: Mapping[str, BadRows] = field(default_factory=dict)

    @property
    def bad_rows(self) -> int:
        """How many rows were left out."""
        return sum(rows.count for rows in self.bad.values())

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.conversations:,} conversations, {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} of them learnt"
        ]
        if len(self.sources) > 1:
            named = sorted(self.sources.items(), key=lambda item: -item[1])
            parts = [f"{name or 'unnamed'} {count:,}" for name, count in named[:_SHOWN]]
            rest = f" and {len(named) - _SHOWN:,} others" if len(named) > _SHOWN else ""
            lines.append("from " + ", ".join(parts) + rest)
        if self.cut:
            lines.append(f"{self.cut:,} cut at the maximum length")
        if self.unlearnt_turns:
            lines.append(
                f"{self.unlearnt_turns:,} assistant turns not learnt: the chat template writes "
                "them differently in the history"
            )
        return lines + bad_lines(self.bad)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "conversations": self.conversations,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "cut": self.cut,
            "unlearnt_turns": self.unlearnt_turns,
            "sources": dict(self.sources),
            "bad": {reason: vars(rows) for reason, rows in self.bad.items()},
        }


class BadRowCounter:
    """Counts rows left out by reason, keeping the first place of each."""

    def __init__(self) -> None:
        self._found: dict[str, BadRows] = {}

    def add(self, reason: str, where: str, count: int = 1) -> None:
        """Count rows of one reason."""
        before = self._found.get(reason)
        self._found[reason] = (
            BadRows(count, where) if before is None else BadRows(before.count + count, before.first)
        )

    def result(self) -> dict[str, BadRows]:
        """The most frequent reason first."""
        return dict(sorted(self._found.items(), key=lambda item: -item[1].count))


def bad_lines(bad: Mapping[str, BadRows]) -> list[str]:
    """One line a reason."""
    return [
        f"{rows.count:,} left out: {reason} (first: {rows.first})" for reason, rows in bad.items()
    ]
