"""Rebuilds docs/results.md and docs/results/ from the raw records in records/."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.forecast import fit_text, with_table
from benchmarks.results_decoding import (
    ENGINE_TEXT,
    head_to_head,
    server_runs,
    serving,
    vllm,
    vllm_speedups,
)
from benchmarks.results_engine import engine, rollout, tried, weights_name
from benchmarks.results_exactness import (
    audit_target,
    audited,
    exactness,
    gpu_dtype,
    gpu_records,
    hybrid_loop,
)
from benchmarks.results_training import (
    SETS,
    ablations,
    by_run,
    change,
    drafts_chosen,
    equal_seconds,
    same_text,
    training,
)
from benchmarks.tables import NONE, Record, field, measured, page, table
from benchmarks.time_to_acceptance import PICTURE, draw
from domino_spec.bench.summary import RunSummary, read_runs
from domino_spec.bench.tables import KINDS, plain_interval, times
from domino_spec.records import read_records
from domino_spec.training.forecast import FIT_FILE

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "records"
DOCS = ROOT / "docs"
GUIDE = DOCS / "training.md"
PAGES = {
    "engine": engine,
    "tried": tried,
    "head-to-head": head_to_head,
    "serving": serving,
    "vllm": vllm,
    "exactness": exactness,
    "training": training,
    "ablations": ablations,
}


def pages(records: Path = RECORDS) -> dict[Path, str]:
    """Every page and its text."""
    details = {DOCS / "results" / f"{name}.md": make(records) for name, make in PAGES.items()}
    return {DOCS / "results.md": headlines(records), **details}


def forecast_files(records: Path = RECORDS) -> dict[Path, str]:
    """What training foretells from, and its table in docs/training.md, from the same records."""
    return {FIT_FILE: fit_text(records), GUIDE: with_table(GUIDE.read_text("utf-8"), records)}


def headlines(records: Path) -> str:
    """The headline of every page, with its condition and where it was measured."""
    return page(
        "# Results",
        "Made from the raw records in `records/` by `make results`; the pages linked below "
        "name the command behind each table. Results that disappoint stay.",
        "- **Speedup**: tokens/s with drafts over plain decoding in the same engine and run; "
        "intervals are 95%.\n"
        "- **Acceptance length**: mean tokens per cycle, bonus token included.\n"
        "- **Same text**: answers that equal plain decoding's to the token. In float32 every "
        "answer measured does; in half precision near-ties may flip with the batch shape.\n"
        "- Real text is gsm8k, humaneval and mt-bench.",
        "## Real text",
        "SmolLM2-135M-Instruct with a released drafter on the engine, all tasks; on the H200 the "
        "main drafter of 2026-11-15 up to commit 79ae83f04cc7. [All tasks and "
        "settings](results/head-to-head.md).",
        _real_text(records),
        "## The server under load",
        "The same target and drafters behind `domino serve`, a closed loop of streamed chat "
        "requests at T = 0, without prefix reuse. [Latencies](results/serving.md).",
        _server(records),
        "## Long contexts",
        "Drafters behind tokens of unrelated text, of which they read the newest 768, or 512 where "
        "`domino train` chose; one sequence, T = 0, speedup of decoding alone. Up to 3a21474 the "
        "two ways prefilled in other shapes, so that bfloat16 texts part. [Why, other windows and "
        "drafters](results/training.md#after-long-texts).",
        _behind_text(records),
        "## The engine",
        "Known shapes with random weights, one sequence, bfloat16, and a **forced** acceptance "
        "length: what the engine gives if a drafter is as good as the paper's. "
        "[Floors, batches, stress tests](results/engine.md), "
        "[what was tried](results/tried.md).",
        _shapes(records),
        "## Offline generation",
        "Plain sampling of many sequences on the engine (`python -m benchmarks.offline`), prompts "
        "of 64 random tokens; the median of the runs, and the slowest.",
        _offline(records),
        "## Domino on vLLM",
        "Qwen3-8B's shape with random weights and a **forced** acceptance length, bfloat16. "
        "[All concurrencies, real text](results/vllm.md).",
        _vllm(records),
        "## Head-to-head",
        "Drafters trained on the same data for the same time, one sequence, all tasks: speedup and "
        "acceptance length. [Each task, how they were trained](results/head-to-head.md).",
        *map(_methods, _compared(records)),
        "## Exactness",
        "Greedy tokens one by one, samples as a distribution. [All cases](results/exactness.md).",
        _exact(records),
        "## Training",
        "Acceptance length of the released drafters, whole blocks drafted; at T = 0.7 of the main "
        "drafter of 2026-11-15. "
        "[How they were made, training speed](results/training.md).",
        _released(records),
        "Ablations at equal seconds, acceptance length on held-out conversations. "
        "[Equal steps, each set](results/ablations.md).",
        _ablated(records),
    )


def _real_text(records: Path) -> str:
    return table(
        {
            "drafter": lambda e: str(e[2].method),
            "sequences": lambda e: str(e[1].cell.batch_size),
            "drafts": lambda e: "adaptive" if e[0].facts["settings"]["adaptive"] else "all",
            "T": lambda e: f"{e[1].cell.temperature:g}",
            "dtype": lambda e: str(e[0].facts["target"]["dtype"]),
            "acceptance length": lambda e: plain_interval(e[2].tokens_per_cycle),
            "speedup": lambda e: times(e[2].speed_up),
            "same text": lambda e: f"{e[2].same} of {e[2].compared}",
            "measured": lambda e: measured(e[0].environments[0]),
        },
        [
            (run, cell, line)
            for run in read_runs(sorted(records.glob(ENGINE_TEXT)))
            for cell in run.overall
            for line in cell.lines[1:]
        ],
    )


def _server(records: Path) -> str:
    return table(
        {
            "concurrency": lambda e: str(e[1].cell.concurrency),
            "dtype": lambda e: e[0].facts["sides"][0]["server"].get("dtype", "float32"),
            "tokens/s": lambda e: f"{e[1].sides[0].tokens_per_second:,.0f}",
            "speedup": lambda e: times(e[2].tokens_per_second),
            "same text": lambda e: f"{e[2].same} of {e[2].compared}",
            "measured": lambda e: measured(e[0].facts["environment"]),
        },
        [
            (run, cell, cell.comparison)
            for run in server_runs(records)
            for cell in run.cells
            if cell.comparison is not None
        ],
    )


def _behind_text(records: Path) -> str:
    return table(
        {
            "target": field("target"),
            "drafter": field("drafter"),
            "tokens before": field("context"),
            "drafts": drafts_chosen,
            "acceptance length": field("tokens_per_cycle", ".2f"),
            "speedup": field("speedup", ".2f", "×"),
            "same text": same_text,
            "questions": field("used"),
            "measured": lambda e: measured(e["environment"]),
        },
        [
            record
            for record in read_records(records / "long-context.jsonl")
            if record.get("sliding_window")  # those trained with a window ...
            and record["window"] is None  # ... as they are
            and "speedup" in record
        ],
    )


def _offline(records: Path) -> str:
    return table(
        {
            "target": field("target"),
            "sequences": field("sequences"),
            "new tokens": field("new_tokens"),
            "T": field("temperature"),
            "tokens/s": lambda e: f"{statistics.median(e['tokens_per_second']):,.0f}",
            "slowest": lambda e: f"{min(e['tokens_per_second']):,.0f}",
            "measured": lambda e: measured(e["environment"]),
        },
        read_records(records / "offline.jsonl"),
    )


def _shapes(records: Path) -> str:
    return table(
        {
            "shape": weights_name,
            "rollout over": rollout,
            "plain step": field("plain.seconds", ".2f", " ms", scale=1e3),
            "cycle": field("cycle.seconds", ".2f", " ms", scale=1e3),
            "forced acceptance length": field("batches.0.gains.0.forced", "g"),
            "speedup": field("batches.0.gains.0.whole", ".2f", "×"),
            "measured": lambda r: measured(r["environment"]),
        },
        read_records(records / "engine.jsonl"),
    )


def _vllm(records: Path) -> str:
    forced = [r for r in read_records(records / "vllm.jsonl") if r["set"] == "random"]
    gains = vllm_speedups(forced)
    numbers = sorted(next(iter(gains.values())))

    def speedup(number: int) -> Any:
        return lambda entry: f"{entry[1][number]:.2f}×"

    return table(
        {
            "forced acceptance length": lambda e: e[0][0],
            "method": lambda e: e[0][1],
            **{f"speedup, concurrency {n}": speedup(n) for n in (numbers[0], numbers[-1])},
            "measured": lambda _: measured(forced[0]["environment"]),
        },
        gains.items(),
    )


def _compared(records: Path) -> list[RunSummary]:
    files = set(records.glob("head-to-head*.jsonl")) - set(records.glob(ENGINE_TEXT))
    return read_runs(sorted(files))


def _methods(run: RunSummary) -> str:
    kinds = {method["name"]: method["kind"] for method in run.facts["methods"]}
    columns: dict[str, Any] = {"drafter": lambda name: KINDS[kinds[name]]}
    for cell in run.overall:
        at = f"T = {cell.cell.temperature:g}"
        columns[f"speedup, {at}"] = lambda name, cell=cell: times(cell.line(name).speed_up)
        columns[f"acceptance length, {at}"] = lambda name, cell=cell: (
            f"{cell.line(name).tokens_per_cycle.value:.2f}"
        )
    return page(
        f"{run.facts['target']['name']}, {run.facts['target']['dtype']}, "
        f"{measured(run.environments[0])}:",
        table(columns, run.methods[1:]),
    )


def _exact(records: Path) -> str:
    heads = ("check", "on", "compared", "differ", "of these proven near-ties", "measured")
    rows: list[tuple[str, ...]] = []
    for record in read_records(records / "audit.jsonl"):
        where = f"{audit_target(record)}, {audited(record)}"
        when = measured(record["environment"])
        if greedy := record["greedy"]:
            tokens, differ = f"{greedy['tokens']:,} tokens", len(greedy["differences"])
            rows.append(("audit, greedy", where, tokens, str(differ), str(greedy["ties"]), when))
        if sampling := record["sampling"]:
            places = f"{len(sampling['places'])} positions × {sampling['samples']} samples"
            rows.append(("audit, sampled", where, places, str(sampling["wrong"]), NONE, when))
    cpu = read_records(records / "exactness.jsonl")
    gpu = gpu_records(records)
    hybrids = read_records(records / "exactness-hybrids.jsonl")
    hybrids = [record for record in hybrids if "restored" not in record]
    groups = [("reference loop, cpu, float32", cpu)]
    for loop, target in dict.fromkeys((hybrid_loop(each), each["target"]) for each in hybrids):
        own = [each for each in hybrids if (hybrid_loop(each), each["target"]) == (loop, target)]
        groups.append((f"{loop}, cpu, {target}", own))
    for dtype in dict.fromkeys(map(gpu_dtype, gpu)):
        own = [record for record in gpu if gpu_dtype(record) == dtype]
        groups.append((f"reference loop, cuda, {dtype}", own))
    for where, group in groups:
        answers = f"{sum(r['prompts'] * r.get('seeds', 1) for r in group):,} answers"
        differ = sum(r["differing_prompts"] for r in group)
        proven = [r["proven_ties"] for r in group if "proven_ties" in r]
        ties = str(sum(proven)) if proven else NONE
        when = measured(group[0]["environment"])
        rows.append(("against `generate`, greedy", where, answers, str(differ), ties, when))
    for group in by_run(read_records(records / "engine-crowd.jsonl")):
        where = f"engine, {group[0]['device']}, {group[0]['dtype']}"
        runs, sequences = (sum(r[name] for r in group) for name in ("crowds", "rows"))
        differ, when = sum(r["differing_crowds"] for r in group), measured(group[0]["environment"])
        size = f"{runs} runs of {sequences:,} sequences in all"
        rows.append(("randomised stress test", where, size, str(differ), NONE, when))
    return table({head: lambda row, at=at: row[at] for at, head in enumerate(heads)}, rows)


def _released(records: Path) -> str:
    found: dict[tuple[str, str, str], dict[str, Record]] = {}  # of each, what was measured last
    for record in read_records(records / "acceptance.jsonl"):
        if record["set"] not in SETS:
            continue
        temperature = f"{record['protocol']['temperature']:g}"
        case = (record["drafter"], temperature, record["way"])
        found.setdefault(case, {})[record["set"]] = record

    def length(name: str) -> Any:
        return lambda case: f"{found[case][name]['tokens_per_cycle']:.2f}"

    return table(
        {
            "drafter": lambda case: case[0],
            "T": lambda case: case[1],
            "how": lambda case: case[2],
            **{name: length(name) for name in SETS},
            "measured": lambda case: measured(found[case][SETS[0]]["environment"]),
        },
        found,
    )


def _ablated(records: Path) -> str:
    runs = equal_seconds(read_records(records / "ablations.jsonl"))
    (domino,) = [run for run in runs if run["label"] == "domino"]
    return table(
        {
            "run": field("name"),
            "acceptance length": field("tokens_per_cycle.held-out.on", ".2f"),
            "against Domino": lambda r: NONE if r is domino else change(r, domino),
            "measured": lambda r: measured(r["environment"]),
        },
        runs,
    )


def main() -> None:
    """Write every page, or with --check say which ones are out of date."""
    made = {**pages(), **forecast_files()}
    if sys.argv[1:] == ["--check"]:
        stale = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
        sys.exit(f"out of date: {', '.join(str(path.name) for path in stale)}" if stale else 0)
    (DOCS / "results").mkdir(exist_ok=True)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    draw(RECORDS, DOCS / "results" / PICTURE)


if __name__ == "__main__":
    main()
