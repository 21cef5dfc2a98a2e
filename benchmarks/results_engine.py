"""The engine's part of the results page."""

from __future__ import annotations

from typing import Any

from benchmarks.results_tried import tried
from benchmarks.tables import circumstances, table


def engine(
    shapes: list[dict[str, Any]],
    unkept: list[dict[str, Any]],
    tilings: list[dict[str, Any]],
    crowds: list[dict[str, Any]],
) -> str:
    """The engine at its floor, then rows that come and go; real text is the head-to-head's."""
    parts = ["## The engine", "", floors(shapes), tried(unkept, tilings), in_any_order(crowds)]
    return "\n".join(parts)


def floors(records: list[dict[str, Any]]) -> str:
    """Random weights of known shapes on a GPU: milliseconds against what their bytes take."""
    first = records[0]
    return "\n".join(
        [
            "### Against the memory's floor",
            "",
            f"Random weights, one row, a context of {first['context']} tokens, {first['depth']} "
            f"drafts a cycle, {first['dtype']}, cycles captured in CUDA graphs. A floor is the "
            "bytes that a forward cannot do without (each weight once, the output matrix twice in "
            "a cycle, keys and values) over the bandwidth that the card showed in the same run "
            f"({_bandwidths(records)} TB/s). Plain decoding is this engine without a drafter. "
            "**Acceptance is forced** to the tokens a cycle named: the same kernels and the same "
            "commit, only the accepted length is overridden. The rollout's share is what drafting "
            "takes beyond its backbone and one reading of the output matrix. The smaller the "
            "model, the more the few microseconds weigh that every launch takes beyond its bytes.",
            "",
            "Each line of the tables is one run:",
            "",
            *(f"- {circumstances([record])}" for record in records),
            "",
            table(
                ["shape", "rollout over", "plain", "its floor", "over it", "cycle", "its floor",
                 "over it", "cycle's over plain's", "rollout", "forced", "Domino over plain",
                 "whole loop"],
                [_floor_row(record) for record in records],
            ),
            "",
            table(
                ["shape", "rollout over", "first cycle after", "memory over weights + caches",
                 "Transformers: plain", "cycle"],
                [_start_row(record) for record in records],
            ),
            "",
            "The first cycle is counted from the making of the weights, with what had to be "
            "compiled; memory is the most held at a time. A cycle's parts, each timed alone; in a "
            "cycle the context for the drafter is made beside the logits:",
            "",
            table(["part", *map(_shape, records)], _stage_rows(records)),
            "",
            batches(next(record for record in records if len(record["batches"]) > 1)),
        ]
    )  # fmt: skip


def batches(record: dict[str, Any]) -> str:
    """More rows at a time: fewer drafts pay."""
    rows = []
    for batch in record["batches"]:
        cells = [str(batch["rows"]), f"{batch['plain_per_second']:.0f}"]
        for gain in batch["gains"]:
            cells += [str(gain["depth"]), f"{gain['gain']:.2f}×", f"{gain['whole']:.2f}×"]
        rows.append(cells)
    heads = ["rows", "plain tokens/s"]
    for forced in record["forced"]:
        heads += [f"drafts at {forced:g}", "over plain", f"with all {record['depth']}"]
    return "\n".join(
        [
            f"{_shape(record)} with more rows at a time. A draft's chance is the one that makes so "
            "many tokens a cycle of whole blocks; of the depths measured, the best is taken, as "
            "the engine does:",
            "",
            table(heads, rows),
            "",
        ]
    )


def _bandwidths(records: list[dict[str, Any]]) -> str:
    found = sorted({f"{record['bandwidth'] / 1e12:.2f}" for record in records})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _shape(record: dict[str, Any]) -> str:
    return f"{record['shape']}, {_over(record)}"


def _over(record: dict[str, Any]) -> str:
    return "all tokens" if record["candidates"] is None else f"top {record['candidates']}"


def _floor_row(record: dict[str, Any]) -> list[str]:
    plain, cycle = record["plain"], record["cycle"]
    parts = {stage["name"]: stage["seconds"] for stage in record["stages"]}
    rollout = parts["draft logits and rollout"] - parts["logits and choice"]
    gain, loop = record["batches"][0]["gains"][0], record["loop"][0]
    return [
        record["shape"],
        _over(record),
        *_held(plain),
        *_held(cycle),
        f"{cycle['over_floor'] / plain['over_floor']:.3f}",
        f"{rollout / cycle['seconds']:.1%}",
        f"{gain['forced']:g}",
        f"{gain['whole']:.2f}×",
        f"{loop['gain']:.2f}×",
    ]


def _held(part: dict[str, float]) -> list[str]:
    times = [f"{part[name] * 1e3:.2f} ms" for name in ("seconds", "floor")]
    return [*times, f"{part['over_floor']:.3f}×"]


def _start_row(record: dict[str, Any]) -> list[str]:
    memory, loop = record["memory"], record.get("reference", {})
    over = memory["peak"] / (memory["weights"] + memory["caches"]) - 1
    return [
        record["shape"],
        _over(record),
        f"{record['first_cycle_seconds']:.0f} s",
        f"{over:+.1%}",
        *(f"{loop[name] * 1e3:.0f} ms" if loop else "" for name in ("plain", "cycle")),
    ]


def _stage_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    names = [stage["name"] for stage in records[0]["stages"]]
    return [
        [name, *(f"{record['stages'][place]['seconds'] * 1e3:.2f} ms" for record in records)]
        for place, name in enumerate(names)
    ]


def in_any_order(records: list[dict[str, Any]]) -> str:
    """Rows by chance against each of them alone."""
    rows = [
        [
            f"{record['device']}, {record['dtype']}",
            record["drafter"],
            "yes" if record["captured"] else "no",
            str(record["crowds"]),
            *(f"{record[name]:,}" for name in _COUNTED),
            f"{record['tokens_per_cycle']:.2f}",
            str(record["differing_crowds"]),
        ]
        for record in records
    ]
    heads = ["device", "drafter", "captured", "crowds", "rows", "taken out early",
             "began behind others", "tokens", "tokens a cycle", "crowds that differ"]  # fmt: skip
    return "\n".join(
        [
            "### Rows in any order",
            "",
            "Rows with sampling, penalties and scores of their own join by chance, are read in "
            "chunks, often behind a beginning that a slot holds already, decode and are taken out; "
            "every token is compared with the reference loop's for that row alone. A small random "
            "target; drafters that are often right, and often not.",
            "",
            *dict.fromkeys(f"- {circumstances([record])}" for record in records),
            "",
            table(heads, rows),
            "",
        ]
    )


_COUNTED = ("rows", "left_early", "began_behind_others", "tokens")
