"""The results page's list of what was tried to come nearer to the memory's floor and not kept."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import circumstances, table


def tried(records: list[dict[str, Any]], tilings: list[dict[str, Any]]) -> str:
    """Empty without records."""
    if not records:
        return ""
    return "\n".join(
        [
            "### Tried and not kept",
            "",
            f"Changes to {records[0]['shape']}'s forward, one row: time over that of the same "
            "code without the change. Above 1 is slower. A change had to gain more than two "
            "hundredths on one side and lose nothing on the other; none did.",
            "",
            circumstances(records),
            "",
            table(
                ["change", "timed", "the first, over before", "the second"],
                [
                    [
                        record["change"],
                        f"{record['timed']} ({_TIMED[record['in_turns']]})",
                        *(
                            f"{record['after'][name] / record['before'][name]:.3f}"
                            for name in ("plain", "cycle")
                        ),
                    ]
                    for record in records
                ],
            ),
            "",
            *_tilings(tilings),
        ]
    )


_TIMED = {True: "in turns", False: "one after the other"}


def _tilings(records: list[dict[str, Any]]) -> list[str]:
    """What other ways to cut them up would give: the best of many, by chance too."""
    rows = []
    for product in dict.fromkeys(record["product"] for record in records):
        timed = [record for record in records if record["product"] == product]
        (own,) = [record["tiling"] for record in timed if record["in_use"]]
        now = min(_both(record) for record in timed if record["tiling"] == own)
        others = [record for record in timed if record["tiling"] != own]
        best = min(map(_both, others))
        rows.append([product, str(len(others)), f"{now / 2:.2f}", f"{best / now:.3f}"])
    if not rows:
        return []
    heads = ["part", "other tilings timed", "in use, µs", "the best of the others, over it"]
    return [
        "Other tilings of a layer's parts, the mean of one token's and sixteen tokens' time:",
        "",
        circumstances(records),
        "",
        table(heads, rows),
        "",
    ]


def _both(record: dict[str, Any]) -> float:
    return float(sum(record["microseconds"].values()))
