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
            "code without the change, timed in turns in one process (the first three in a process "
            "each). Above 1 is slower. A change that helps one of the two by less than it costs "
            "the other, or both by a hundredth for many lines, was not kept either.",
            "",
            circumstances(records),
            "",
            table(
                ["change", "timed", "plain, over before", "cycle or block, over before"],
                [
                    [
                        record["change"],
                        record["timed"],
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


def _tilings(records: list[dict[str, Any]]) -> list[str]:
    """What other ways to cut up a layer's products would give: the best of many, by chance too."""
    rows = []
    for product in dict.fromkeys(record["product"] for record in records):
        timed = [record for record in records if record["product"] == product]
        now = min(_both(record) for record in timed if record["in_use"])
        best = min(_both(record) for record in timed)
        rows.append([product, str(len(timed)), f"{now / 2:.2f}", f"{best / now:.3f}"])
    if not rows:
        return []
    heads = ["product", "tilings timed", "in use, µs", "the best of them, over it"]
    return [
        "Other tilings of a layer's products, the mean of one row's and sixteen rows' time:",
        "",
        circumstances(records),
        "",
        table(heads, rows),
        "",
    ]


def _both(record: dict[str, Any]) -> float:
    return float(sum(record["microseconds"].values()))
