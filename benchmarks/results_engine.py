"""The engine's part of the results page."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import circumstances, table


def engine(records: list[dict[str, Any]]) -> str:
    """Real text on a CPU, with a drafter against without."""
    rows = [
        [
            record["set"],
            f"{record['temperature']:g}",
            f"{record['speed_up']:.2f}×",
            f"{min(_ratios(record)):.2f}× to {max(_ratios(record)):.2f}×",
            f"{record['tokens_per_cycle']:.2f}",
            f"{record['identical']} of {len(record['batches'])}",
            f"{record['used']} of {len(record['batches'])}",
        ]
        for record in records
    ]
    heads = ["set", "T", "over plain", "single prompts", "tokens a cycle", "same text", "used"]
    first = records[0]
    return "\n".join(
        [
            "## The engine",
            "",
            f"{first['target']} with {first['drafter'].removeprefix('released:')}, "
            f"{first['dtype']}, {first['threads']} threads, one row, {first['new_tokens']} new "
            "tokens: the engine with a drafter against the same engine without, in turns, the "
            f"median of {first['rounds']} for each prompt; reading the prompt is not timed. Depth "
            "is chosen cycle by cycle from costs measured on the machine. Prompts whose plain "
            "answer loops or is short are left out of the sums. (The run was ended before "
            "humaneval at T = 0.7.)",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )


def _ratios(record: dict[str, Any]) -> list[float]:
    return [
        line["plain_seconds"] / line["domino_seconds"]
        for line in record["batches"]
        if line["outcomes"].count("used") * 2 > len(line["outcomes"])
    ]
