"""The engine's pages: speed against the memory bandwidth, stress tests, and what was tried."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import NONE, Columns, Record, field, made, page, table
from domino_spec.records import read_records


def engine(records: Path) -> str:
    """Known shapes with forced acceptance, then the randomised stress tests."""
    shapes = read_records(records / "engine.jsonl")
    first = shapes[0]
    return page(
        "# The engine",
        "## Against the memory bandwidth",
        f"Random weights, one sequence, a context of {first['context']} tokens, {first['depth']} "
        f"drafts per cycle, {first['dtype']}, cycles captured in CUDA graphs. The floor is the "
        "time that the bytes of a forward take (each weight once, the lm_head twice in a cycle, "
        "the KV cache) at the bandwidth the card showed in the same run "
        f"({_bandwidths(shapes)} TB/s). Plain decoding is this engine without a drafter. "
        "**The acceptance length is forced**: the same kernels and the same commit, only the "
        "accepted length is overridden. The rollout's share is what drafting takes beyond its "
        "backbone and one read of the lm_head. The smaller the model, the more the few "
        "microseconds weigh that every launch takes beyond its bytes.",
        made(shapes),
        table(_FLOOR, shapes),
        table(_START, shapes),
        "The first cycle is counted from the creation of the weights and includes compilation; "
        "memory is the peak. A cycle's parts, each timed alone (in a cycle the drafter's context "
        "is computed concurrently with the logits):",
        _stages(shapes),
        *_tree_cycles([record for record in shapes if "tree" in record]),
        *(_batches(record) for record in shapes if len(record["batches"]) > 1),
        stress(read_records(records / "engine-crowd.jsonl")),
        pages(read_records(records / "paged-caches.jsonl")),
        before_and_after(read_records(records / "redesign.jsonl")),
        peaks(read_records(records / "memory.jsonl")),
        draft_costs(read_records(records / "draft-costs.jsonl")),
    )


def pages(records: list[dict[str, Any]]) -> str:
    """What finding keys by pages costs."""
    columns: Columns = {
        "shape": field("shape"),
        "sequences": field("rows"),
        "tokens each": field("context", ","),
        "plain step": field("ratio.plain", ".3f"),
        "cycle": field("ratio.cycle", ".3f"),
    }
    return page(
        "## Pages of the caches",
        f"Caches in pages of {records[0]['page']} tokens against one stretch a sequence: the time "
        "of a step with pages over that without, bfloat16, medians in turns.",
        made(records),
        table(columns, records),
    )


def peaks(records: list[dict[str, Any]]) -> str:
    """Peak memory of whole commands on a CPU."""
    columns: Columns = {
        "target": field("target"),
        "file": field("file_bytes", ",.0f", " MB", scale=1e-6),
        "drafts": lambda r: r["draft"] or NONE,
        "not installed": lambda r: ", ".join(r["without"]) or NONE,
        "peak": lambda r: f"{max(r['later']) / 1e6:,.0f} MB",
        "first run": field("first", ",.0f", " MB", scale=1e-6),
    }
    return page(
        "## Memory of quantised targets on a CPU",
        "Peak resident memory of `domino generate FILE --quantize keep` (64 tokens), each in a "
        "process of its own; MB are 10⁶ bytes. About 370 MB are Python, PyTorch and Transformers, "
        "which imports `triton` where it is installed. The first run also converts the tokenizer "
        "and compiles the kernels; runs with a drafter measure the costs of cycles until a quiet "
        "machine has let them be kept, and that is in these figures.",
        made(records),
        table(columns, records),
    )


def draft_costs(records: list[dict[str, Any]]) -> str:
    """What cycles cost by depth, what they commit, and so what drafts can gain at best."""
    last = records[-1]
    lengths = {int(depth): x for depth, x in last["acceptance_length"]["all"].items()}

    def costs(what: str, depth: int) -> list[float]:
        return [
            record["costs"][f"{what} {depth}"]["seconds"] / record["costs"]["plain"]["seconds"]
            for record in records
        ]

    def gains(what: str, depth: int) -> list[float]:
        return [lengths.get(depth, 1.0) / cost for cost in costs(what, depth)]

    def drafting(depth: int) -> list[float]:
        pairs = zip(costs("cycle", depth), costs("free", depth), strict=True)
        return [whole - free for whole, free in pairs]

    best = max(lengths, key=lambda depth: sum(gains("cycle", depth)))
    bound = max(lengths, key=lambda depth: sum(gains("free", depth)))
    columns: Columns = {
        "drafts": str,
        "acceptance length": lambda depth: f"{lengths.get(depth, 1.0):.2f}",
        "target's forward": lambda depth: _each(costs("forward", depth)),
        "cycle, free drafts": lambda depth: _each(costs("free", depth)),
        "cycle": lambda depth: _each(costs("cycle", depth)),
        "speedup": lambda depth: _each(gains("cycle", depth), "×"),
        "with free drafts": lambda depth: _each(gains("free", depth), "×"),
    }
    plain = last["costs"]["plain"]["seconds"]
    parts = last["parts"][str(best)].items()
    return page(
        "## What drafts can gain on a quantised target",
        f"{last['target']} in its own blocks with {last['drafter']}, one sequence behind "
        f"{last['context']} tokens; times in plain steps, the least of "
        f"{last['rounds']} rounds in turns. *Free drafts* take no time and are never right. "
        f"Acceptance lengths at T = 0 of {sum(last['used'].values())} answers of "
        f"{', '.join(last['used'])}, up to {last['new_tokens']} tokens each, loops left out. "
        "Speedups are of cycles alone: a prompt's prefill and the host's work between cycles come "
        "on top, so those of the [head-to-head](head-to-head.md) are lower.",
        made(records),
        table(columns, [0, *sorted(lengths)]),
        f"With {best} drafts, the best depth, drafting takes {_each(drafting(best))} of a plain "
        f"step; a drafter that costs nothing and is accepted as often would give "
        f"{_each(gains('free', bound), '×')} with {bound}.",
        f"Parts of a cycle with {best} drafts, each timed alone, in plain steps: "
        + ", ".join(f"{name} {seconds / plain:.2f}" for name, seconds in parts)
        + ".",
    )


def _each(values: Iterable[float], unit: str = "") -> str:
    return " / ".join(f"{value:.2f}{unit}" for value in values)


def before_and_after(records: list[dict[str, Any]]) -> str:
    """Two trees that took turns on one card: medians of a tree's runs."""
    cells: dict[str, dict[str, list[float]]] = {}
    for record in records:
        if "batches" in record:
            for batch in record["batches"]:
                gain = batch["gains"][0]
                name = f"{record['shape']}, batch of {batch['rows']}, length {gain['forced']:g}"
                cells.setdefault(name, {}).setdefault(record["tree"], []).append(gain["gain"])
    sums: dict[tuple[str, int, str], list[float]] = {}
    for record in records:
        for method, values in record.get("methods", {}).items() if "unit" in record else ():
            found = sums.setdefault((record["tree"], record["round"], method), [0.0, 0.0])
            found[0] += sum(row["tokens"] for row in values["rows"])
            found[1] += median(values["seconds"])
    paces = {key: tokens / seconds for key, (tokens, seconds) in sums.items()}
    for (tree, number, method), pace in paces.items():
        if method != "plain":
            gain = pace / paces[tree, number, "plain"]
            cells.setdefault("SmolLM2, one request, T 0", {}).setdefault(tree, []).append(gain)
    rows = [
        {"name": name, **{tree: median(gains) for tree, gains in trees.items()}}
        for name, trees in cells.items()
    ]
    columns: Columns = {
        "": field("name"),
        "before": field("old", ".2f", "×"),
        "after": field("new", ".2f", "×"),
        "ratio": lambda row: f"{row['new'] / row['old']:.3f}",
    }
    commits = dict.fromkeys(f"{r['tree']} {r['environment']['commit']}" for r in records)
    return page(
        "## Before and after the redesign",
        "The speedup over plain decoding of the same tree, forced acceptance lengths, top-32 "
        "rollout; and the released drafter on real text. Both trees in turns on one card "
        f"({', '.join(commits)}), medians of two runs each.",
        made(records),
        table(columns, rows),
    )


def shape_name(record: Record) -> str:
    """Shape and rollout, as in `qwen3-8b, top 32`."""
    return f"{weights_name(record)}, {rollout(record)}"


def weights_name(record: Record) -> str:
    """The shape, and what its layers are stored as where they are quantised."""
    quantize = record.get("quantize")
    return str(record["shape"]) if quantize is None else f"{record['shape']} in {quantize}"


def rollout(record: Record) -> str:
    """What the head's rollout goes over."""
    return "all tokens" if record["candidates"] is None else f"top {record['candidates']}"


def _rollout_share(record: Record) -> str:
    parts = {stage["name"]: stage["seconds"] for stage in record["stages"]}
    seconds = parts["draft logits and rollout"] - parts["logits and choice"]
    return f"{seconds / record['cycle']['seconds']:.1%}"


def _memory(record: Record) -> str:
    memory = record["memory"]
    return f"{memory['peak'] / (memory['weights'] + memory['caches']) - 1:+.1%}"


def _transformers(name: str) -> Any:
    def show(record: Record) -> str:
        return f"{record['reference'][name] * 1e3:.0f} ms" if record.get("reference") else ""

    return show


def _ms(name: str) -> Any:
    return field(name, ".2f", " ms", scale=1e3)


_CASE: Columns = {"shape": weights_name, "rollout over": rollout}
_FLOOR: Columns = _CASE | {
    "plain step": _ms("plain.seconds"),
    "step floor": _ms("plain.floor"),
    "step / floor": field("plain.over_floor", ".3f"),
    "cycle": _ms("cycle.seconds"),
    "cycle floor": _ms("cycle.floor"),
    "cycle / floor": field("cycle.over_floor", ".3f"),
    "ratio of the two": lambda r: f"{r['cycle']['over_floor'] / r['plain']['over_floor']:.3f}",
    "rollout": _rollout_share,
    "forced acceptance length": field("batches.0.gains.0.forced", "g"),
    "speedup": field("batches.0.gains.0.whole", ".2f", "×"),
    "speedup, whole loop": field("loop.0.gain", ".2f", "×"),
}
_TREE: Columns = _CASE | {
    "nodes": field("tree.nodes"),
    "chain's cycle": _ms("tree.chain"),
    "tree's cycle": _ms("tree.seconds"),
    "tree / chain": lambda r: f"{r['tree']['seconds'] / r['tree']['chain']:.3f}",
    "making the tree": _ms("tree.stages.tree"),
    "share of the cycle": lambda r: f"{r['tree']['stages']['tree'] / r['tree']['seconds']:.1%}",
}


def _tree_cycles(records: list[dict[str, Any]]) -> list[str]:
    if not records:
        return []
    return [
        "A tree of as many drafts as the chain has, in turns with the chain. Its making replaces "
        "the chain's rollout:",
        table(_TREE, records),
    ]


_START: Columns = _CASE | {
    "first cycle after": field("first_cycle_seconds", ".0f", " s"),
    "peak memory over weights + caches": _memory,
    "reference loop, plain step": _transformers("plain"),
    "reference loop, cycle": _transformers("cycle"),
}


def _bandwidths(records: list[dict[str, Any]]) -> str:
    found = sorted({f"{record['bandwidth'] / 1e12:.2f}" for record in records})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _stages(records: list[dict[str, Any]]) -> str:
    def seconds(place: int) -> Any:
        return lambda name: f"{stages[place][name] * 1e3:.2f} ms"

    stages = [{s["name"]: s["seconds"] for s in record["stages"]} for record in records]
    columns = {shape_name(record): seconds(place) for place, record in enumerate(records)}
    return table({"part": str, **columns}, stages[0])


def _batches(record: Record) -> str:
    columns: dict[str, Any] = {
        "sequences": field("rows"),
        "plain tokens/s": field("plain_per_second", ".0f"),
    }
    for place, forced in enumerate(record["forced"]):
        gain = f"gains.{place}"
        columns[f"drafts at {forced:g}"] = field(f"{gain}.depth")
        columns[f"speedup at {forced:g}"] = field(f"{gain}.gain", ".2f", "×")
        columns[f"with all {record['depth']} at {forced:g}"] = field(f"{gain}.whole", ".2f", "×")
    return page(
        f"{shape_name(record)} with more sequences. Every draft has the acceptance probability "
        "that gives the acceptance length with whole blocks; of the depths measured the best is "
        "taken, as the engine does:",
        table(columns, record["batches"]),
    )


def stress(records: list[dict[str, Any]]) -> str:
    """Randomised stress tests: every sequence of a changing batch against itself alone."""
    columns: Columns = {
        "device": lambda r: f"{r['device']}, {r['dtype']}",
        "drafter": field("drafter"),
        "CUDA graphs": lambda r: "yes" if r["captured"] else "no",
        "runs": field("crowds"),
        "sequences": field("rows", ","),
        "aborted": field("left_early", ","),
        "with a reused prefix": field("began_behind_others", ","),
        "tokens": field("tokens", ","),
        "acceptance length": field("tokens_per_cycle", ".2f"),
        "runs that differ": field("differing_crowds"),
    }
    return page(
        "## Randomised stress test",
        "Sequences with their own sampling parameters, penalties and log-probabilities arrive at "
        "random, are prefilled in chunks, often after a prefix that a slot still holds, decode and "
        "are aborted at random; every token is compared with the reference loop's for that "
        "sequence alone. A small random target; drafters that are often right and often wrong.",
        made(records),
        table(columns, records),
    )


def tried(records: Path) -> str:
    """Changes that were timed, kept or not."""
    changes = read_records(records / "engine-tried.jsonl")
    return page(
        "# What was tried for the engine",
        f"Changes for {changes[0]['shape']}'s shape or that named, one sequence: time relative to "
        "the same code without the change. Above 1 is slower. *In turns*: the median of three "
        "rounds or more, alternating in one process. Code that was not kept is gone; where a "
        "change was tried again, the code around it had changed.",
        made(changes),
        changes_table(changes),
        "## Tilings",
        tilings(read_records(records / "engine-tilings.jsonl")),
    )


def changes_table(changes: list[dict[str, Any]]) -> str:
    """Each change, what was timed, and time after over time before."""

    def ratios(record: Record) -> str:
        pairs = zip(record["after"], record["before"], strict=True)
        return " / ".join(f"{after / before:.3f}" for after, before in pairs)

    def timed(record: Record) -> str:
        how = "in turns" if record["in_turns"] else "one after the other"
        return f"{' / '.join(record['timed'])} ({how})"

    return table(
        {
            "change": field("change"),
            "timed": timed,
            "relative time": ratios,
            "kept": lambda r: "yes" if r["kept"] else "no",
        },
        changes,
    )


def tilings(records: list[dict[str, Any]]) -> str:
    """Other tilings of a layer's kernels; the best of many looks good by chance too."""
    entries = []
    for part in dict.fromkeys(record["product"] for record in records):
        timed = [record for record in records if record["product"] == part]
        (own,) = [record["tiling"] for record in timed if record["in_use"]]
        now = min(_both(record) for record in timed if record["tiling"] == own)
        others = [_both(record) for record in timed if record["tiling"] != own]
        entries.append((part, str(len(others)), f"{now / 2:.2f}", f"{min(others) / now:.3f}"))
    heads = ("part", "other tilings timed", "in use, µs", "best of the others, relative time")
    return page(
        "Other tilings of a layer's kernels; the mean of the times for one and sixteen tokens:",
        made(records),
        table({head: lambda e, at=at: e[at] for at, head in enumerate(heads)}, entries),
    )


def _both(record: Record) -> float:
    return float(sum(record["microseconds"].values()))
