"""The results page's list of what was tried to come nearer to the memory's floor."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import circumstances, table


def tried(records: list[dict[str, Any]], tilings: list[dict[str, Any]]) -> str:
    """Empty without records."""
    if not records:
        return ""
    heads = ["change", "timed", "over before", "kept"]
    return "\n".join(
        [
            "### What was tried",
            "",
            f"Changes for {records[0]['shape']}'s shape, one row: time over that of the same code "
            "without the change, for each that was timed. Above 1 is slower. What was timed in "
            "turns is the median of three rounds or more in one process. Code of what was not kept "
            "is gone; where a change of that kind was tried again, the code around it was another.",
            "",
            *_circumstances(records),
            "",
            table(heads, [_change(record) for record in records]),
            "",
            *_tilings(tilings),
        ]
    )


def _circumstances(records: list[dict[str, Any]]) -> list[str]:
    return [f"- {line}" for line in dict.fromkeys(circumstances([each]) for each in records)]


def _change(record: dict[str, Any]) -> list[str]:
    pairs = zip(record["after"], record["before"], strict=True)
    how = "in turns" if record["in_turns"] else "one after the other"
    return [
        record["change"],
        f"{' / '.join(record['timed'])} ({how})",
        " / ".join(f"{after / before:.3f}" for after, before in pairs),
        "yes" if record["kept"] else "no",
    ]


def _tilings(records: list[dict[str, Any]]) -> list[str]:
    """What other ways to cut parts of a layer up give; the best of many is so by chance too."""
    if not records:
        return []
    rows = []
    for part in dict.fromkeys(record["product"] for record in records):
        timed = [record for record in records if record["product"] == part]
        (own,) = [record["tiling"] for record in timed if record["in_use"]]
        now = min(_both(record) for record in timed if record["tiling"] == own)
        others = [_both(record) for record in timed if record["tiling"] != own]
        rows.append([part, str(len(others)), f"{now / 2:.2f}", f"{min(others) / now:.3f}"])
    heads = ["part", "other tilings timed", "in use, µs", "the best of the others, over it"]
    return [
        "Other tilings of a layer's parts, the mean of one token's and sixteen tokens' time:",
        "",
        *_circumstances(records),
        "",
        table(heads, rows),
        "",
    ]


def _both(record: dict[str, Any]) -> float:
    return float(sum(record["microseconds"].values()))
