"""The page's first table: how much faster, in a few lines, each with where it is measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results_serving import FILE as SERVED
from benchmarks.results_vllm import ratios as vllm_ratios
from benchmarks.tables import table
from domino_spec.bench import read_runs
from domino_spec.bench.summary import CellSummary, RunSummary
from domino_spec.bench.tables import times
from domino_spec.load.summary import read_runs as read_loads
from domino_spec.records import read_records

ENGINE_TEXT = "head-to-head-engine*.jsonl"
"""Runs of `domino bench` with a released drafter alone, on the engine."""
HEADS = ["what", "on", "over plain decoding", "section"]


def in_short(records: Path) -> str:
    """What of it was measured; nothing where nothing was."""
    rows = [*_text(records), *_server(records), *_shapes(records), *_vllm(records)]
    if not rows:
        return ""
    return "\n".join(
        [
            "## In short",
            "",
            "Tokens a second with a Domino drafter over plain decoding in the same run; intervals "
            "are 95%. Real text is SmolLM2-135M-Instruct with a drafter released here, all tasks "
            "together. Shapes have random weights and **forced** acceptance: what the machinery "
            "gives if a drafter is as good as the paper's.",
            "",
            table(HEADS, rows),
            "",
        ]
    )


def _text(records: Path) -> Iterator[list[str]]:
    files = sorted(records.glob(ENGINE_TEXT))
    for run in read_runs(files) if files else []:
        hardware = run.environments[0]["hardware"]
        for cell in run.overall:
            rows = "one row" if cell.cell.batch_size == 1 else f"{cell.cell.batch_size} rows"
            what = f"real text, engine, {rows}, T = {cell.cell.temperature:g}"
            yield [what, hardware, _gain(run, cell), "[head-to-head](#head-to-head)"]


def _gain(run: RunSummary, cell: CellSummary) -> str:
    (name,) = (method["name"] for method in run.facts["methods"] if method["kind"] == "domino")
    return times(cell.line(name).speed_up)


def _server(records: Path) -> Iterator[list[str]]:
    path = records / SERVED
    for run in read_loads(path) if path.exists() else []:
        hardware = run.facts["environment"]["hardware"]
        for cell in run.cells:
            if cell.comparison is not None:
                gain = times(cell.comparison.tokens_per_second)
                what = f"real text, server, {cell.cell}"
                yield [what, hardware, gain, "[server](#the-server-under-load)"]


def _shapes(records: Path) -> Iterator[list[str]]:
    path = records / "engine.jsonl"
    for record in read_records(path) if path.exists() else []:
        if record["candidates"] is None:
            continue
        gain = record["batches"][0]["gains"][0]
        what = f"{record['shape']}, engine, one row, forced to {gain['forced']:g} tokens a cycle"
        hardware = record["environment"]["hardware"]
        yield [what, hardware, f"{gain['whole']:.2f}×", "[engine](#the-engine)"]


def _vllm(records: Path) -> Iterator[list[str]]:
    path = records / "vllm.jsonl"
    found: list[dict[str, Any]] = read_records(path) if path.exists() else []
    forced = [record for record in found if record["set"] == "random"]
    for (length, method), gains in vllm_ratios(forced).items():
        most = max(gains)
        what = f"qwen3-8b, vLLM ({method}), 1 and {most} requests, forced to {length}"
        hardware = forced[0]["environment"]["hardware"]
        gain = f"{gains[1]:.2f}× and {gains[most]:.2f}×"
        yield [what, hardware, gain, "[vLLM](#domino-on-vllm)"]
