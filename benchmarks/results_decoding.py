"""The pages on decoding real text: head-to-head, the server under load, and vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    NONE,
    Columns,
    Record,
    field,
    made,
    made_together,
    page,
    remarks,
    table,
)
from domino_spec.bench.summary import RunSummary, read_runs
from domino_spec.bench.tables import KINDS, circumstances, markdown
from domino_spec.load.summary import RunSummary as LoadSummary
from domino_spec.load.summary import read_runs as read_loads
from domino_spec.load.tables import caveats, how_measured, tables
from domino_spec.records import read_records

ENGINE_TEXT = "head-to-head-engine*.jsonl"
"""Runs of `domino bench` with a released drafter alone."""
TRAINED = "head_to_head_train.jsonl"
"""Drafters of every kind for SmolLM2, trained by a script that `benchmarks.sweep` replaced."""

_HEAD_TO_HEAD_REMARKS = {
    "ba74ffc72d7f": (
        "The depth chosen cycle by cycle, then fixed depths of 2 and 3, one after the other: with "
        "drafts in blocks of 6 a depth of 3 is level with a threshold on the drafter's own "
        "probabilities, which chose for one sequence on a CPU at that commit. Later commits choose "
        "a depth by acceptance and costs."
    ),
    "851e76826c9c": (
        "From commit 851e768 on smollm2-135m-instruct-cpu drafts blocks of 6; the one before, of "
        "8, was its beginning."
    ),
    "c394f4c04051": (
        "Gemma 3 270M (the base model, a GGUF of 4 bits, run in bfloat16) with a drafter trained "
        "from nothing but the target in six minutes, 120 s of them in steps "
        "([training](training.md#drafters-by-the-commands-alone)). Few prompts count: the model "
        "loops in most of its greedy answers, so T = 0.7 is what tells something."
    ),
    "9f7a339": (
        "The drafters of Qwen2.5-Coder-1.5B-Instruct (a GGUF of 4 bits, run in bfloat16) were "
        "trained with all defaults, each for 400 s on one H200 and the same 36,270 answers of the "
        "target ([training](training.md#the-recipe)). Every method drafts to its full depth. In "
        "bfloat16 a quarter of the answers parts from plain decoding's at a near-tie, with every "
        "drafter alike."
    ),
    "4545a6a": (
        "The other kinds for the same target, 400 s each on 36,300 answers made in the same way; "
        "EAGLE-3 and Medusa with Muon, which won short runs against AdamW. Plain decoding and "
        "prompt lookup are in both runs and agree within 1%, so the two tables compare: over all "
        "tasks Domino decodes at 2.50 times plain decoding's speed, DFlash at 2.27, Markov at "
        "2.24, EAGLE-3 at 1.89, Medusa at 1.65, prompt lookup at 1.58. EAGLE-3 has the longest "
        "acceptance length, 3.80 against Domino's 3.65: it learns faster, but its seven drafts "
        "are seven passes one after another, each through its layer and the whole lm_head, and "
        "cost what they gain. Domino is 13% ahead of DFlash in acceptance length and 10% in "
        "speed."
    ),
    "93dfc37": (
        "The main drafter of 2026-11-18, chains against chains or trees of 15 drafts, both chosen "
        "cycle by cycle; every text is plain decoding's own, in bfloat16 too. At T = 0 trees "
        "accept 1.10 times as much and are 4% faster, at T = 0.7 1.15 times and 3 to 4%: a tree's "
        "cycle takes longer than a chain's of as many drafts ([by shape](engine.md)), for making "
        "the tree and for attention that gives each node its branch's own bits. Where chains "
        "accept most (gsm8k, greedy) the engine stays with chains. Both gains were meant to be "
        "larger (6% and 15%)."
    ),
    "5d517a9": (
        "Batches of 16 with the same drafter: up to 256 rows of this target's products have "
        "kernels of their own since, and the head's rollout looks at 32 candidates. Before, the "
        "same drafter gave 1.23 times at T = 0 and 1.03 at T = 0.7 (a shorter run, no record)."
    ),
    "6a32e54": (
        "Two runs on the same two CPU cores, one after the other: a GGUF's own blocks "
        "(`--quantize keep`) and the same file unpacked to float32. Blocks decode plainly 1.62 "
        "times as fast and with drafts 1.17 times; drafts gain less there, since at that commit "
        "the drafter was float32 and each token attended by itself. llama.cpp (llama-cpp-python "
        "0.3.36, the same file, two threads, two other prompts) decoded plainly at 78 to 85 "
        "tokens/s, three times as fast (no record): products were a third of a token's 35 ms, "
        "the rest PyTorch's operations. Since then all layers are one compiled call; aarch64 is "
        "not measured anew."
    ),
    "b3450827402d": (
        "A GGUF's own blocks on two x86-64 threads with AVX-512 and VNNI, in turns with "
        "llama-cpp-python 0.3.36 over the same file and token ids, other work stopped. Plain "
        "decoding is 2.07 times as fast as llama.cpp's, 2.50 times with the prompt. Drafts always "
        "verified to the full depth of 7 lose against it (0.79 times): one token takes 9 ms "
        "since all layers run in one call, and a drafter's own small operations as long again. "
        "Against llama.cpp they still decode 1.61 times as fast. All 46 texts are plain "
        "decoding's."
    ),
    "7e905a866711": (
        "The same comparison with the kernels and the CPU drafter of 2026-11-20; each cycle's "
        "depth is chosen by acceptance and costs alone. Plain decoding is 1.78 times as fast as "
        "llama.cpp's, 2.29 times with the prompt; with drafts it is 2.80 and 3.28 times. The 29 "
        "texts are plain decoding's. Less of the lead is in plain decoding than two days before: "
        "the two runs had different prompts, and machines of this kind differ from day to day."
    ),
    "2e08d40a721f": (
        "On two CPU cores chains and trees are level over all tasks. mt-bench has 1.33 times "
        "against the chain's 1.37, inside both intervals, but a tree's first tries cost most where "
        "acceptance is low and answers are short."
    ),
    "79ae83f04cc7": (
        "In half precision, batches of more than 16 tokens go through the vendor's library on the "
        "H200, which rounds by shape, so most texts of 16 sequences differ from plain decoding's "
        "([exactness](exactness.md) judges such places one by one); one sequence alone gives the "
        "same text every time. Drafts gain less with 16 sequences than in the records at cc8f729 "
        "(1.43 and 1.12 times): plain steps of 16 tokens have become about a seventh faster "
        "since, longer blocks are the vendor's.\n\n"
        "In the head-to-head each cycle's depth is the one that pays on the card. A target this "
        "small is read in less than a millisecond, so a drafter's cost weighs as much as its "
        "acceptance length. Over all tasks EAGLE-3 and Domino have the longest acceptance lengths "
        "at T = 0, Domino at T = 0.7, but their cycles take longer than DFlash's, which drafts in "
        "one step. Domino and DFlash are level at T = 0 and within each other's intervals at "
        "T = 0.7."
    ),
    "52caea21666b": (
        "On the CPU each cycle's depth is the one that pays there, so acceptance lengths are not "
        "what a drafter could reach: verification is expensive, drafts are few, and a small "
        "drafter gains on a good one. Prompt lookup verifies as many tokens where it found "
        "nothing to draft."
    ),
}
_LENGTHS_REMARKS = {
    "d773883": (
        "On the H200 SmolLM2's cycles hardly cost more with more drafts, and at d773883 a budget "
        "drafted to the drafter's full depth of 15: with 16 sequences a budget of 3 cost 1,321 µs "
        "where a chain of 3 cost 1,084, with 64 sequences 2,306 and 1,544 "
        "(`records/verify-lengths-costs.jsonl`). So the engine stayed with chains and the two ways "
        "are level. Since then a budget of n drafts 2n + 1; that is "
        "not measured on a card yet. At equal numbers of verified drafts the choice by chances "
        "commits 4 to 6% more tokens a cycle (12 prompts on a CPU, budgets of 1 to 3 against "
        "chains of 1 to 3, no record)."
    ),
}
_SERVING_REMARKS = {
    "03565b9": (
        "The run of 03565b9 has the main drafter of 2026-11-15. All are without prefix reuse, "
        "since they repeat prompts; with it, as is the default, a server of 9f7a339 gave 15,824 "
        "tokens/s, 1.74 times plain decoding's, and a p95 TTFT of 56 ms, where without it the p95 "
        "was 46 (no record)."
    ),
    "5b81d93": (
        "Qwen2.5-Coder-1.5B-Instruct (a GGUF of 4 bits, run in bfloat16) with a drafter trained "
        "by the defaults for 370 s on 25,820 of the target's own answers, made in 150 s: held out "
        "it accepts 4.10 tokens a cycle. Three rounds, so no intervals."
    ),
    "d773883": (
        "At d773883 the event loop rests twice what a delivery took and first and last chunks "
        "wait for nothing. The card's host was slower than in the run of 5d517a9 (one request: "
        "the same speedup), and with 32 requests and more both sides wait for the host: the "
        "engine alone decodes 64 sequences plainly at 50,000 tokens/s "
        "([head-to-head](head-to-head.md)), this server at 19,600."
    ),
    "5d517a9": (
        "In the run of 5d517a9 the event loop rested three times what a delivery took it, last "
        "chunks too, so that clients in a closed loop asked later. A look at 5435558, which "
        "rested twice what a delivery took, had 33,400 tokens/s with 32 requests, 1.78 times "
        "plain decoding's 18,800, and with 8, 32 and 64 requests 2.16, 1.78 and 1.34 times (three "
        "rounds, no record). First and last chunks no longer wait since. With "
        "more than 16 tokens in a forward rounding depends on the batch, and most texts differ "
        "somewhere ([exactness](exactness.md) judges such places one by one)."
    ),
}


def head_to_head(records: Path) -> str:
    """All runs of `domino bench` on record, and how the compared drafters were trained."""
    files = sorted(records.glob("head-to-head*.jsonl"))
    trained = records / TRAINED
    lines = [record for path in files for record in read_records(path)]
    return page(
        "# Head-to-head",
        "Drafters against plain decoding by `domino bench` ([how](../bench.md)). The speedup is in "
        "tokens/s from the prompt to the last token; *decoding alone* leaves the prefill out. The "
        "same records as a page with charts: "
        f"`domino report {' '.join(f'records/{path.name}' for path in files)}`.",
        _trained(read_records(trained)) if trained.exists() else "",
        markdown(read_runs(files)),
        _trees(read_runs([path for path in files if "trees" in path.name])),
        *_lengths(records / "verify-lengths.jsonl"),
        *remarks((line["environment"] for line in lines), _HEAD_TO_HEAD_REMARKS),
    )


_DOMINO_TREE = (
    ("DominoTree, as reported", "Qwen3-4B", "0", 7.17, 7.98, NONE),
    ("DominoTree, as reported", "Qwen3-8B", "0", 7.33, 8.09, NONE),
    ("DominoTree, as reported", "Qwen3-8B", "1", 5.78, 6.61, NONE),
)
"""Who, target, T, acceptance length of the chain and of the tree, speed over the chain."""


def _trees(runs: Sequence[RunSummary]) -> str:
    """Trees against chains of the same drafter, beside what is published."""
    rows = list(_DOMINO_TREE)
    for run in runs:
        for cell in run.overall:
            chain, tree = cell.lines[1:3]
            lengths = (chain.tokens_per_cycle.value, tree.tokens_per_cycle.value)
            gain = tree.speed_up.value / chain.speed_up.value
            name = run.facts["target"]["name"].partition(".")[0]
            at = f"{cell.cell.temperature:g}"
            ways = (
                "adaptive" if run.facts["settings"]["adaptive"] else "all drafts, or a tree of 15"
            )
            who = f"here, {run.facts['target']['device']}, {ways}"
            rows.append((who, name, at, *lengths, f"{gain:.2f}×"))
    if len(rows) == len(_DOMINO_TREE):
        return ""
    heads = ("tree", "target", "T", "chain", "tree's", "gain", "speed over the chain")
    return page(
        "Trees against chains of the same drafter: acceptance lengths. DominoTree's authors "
        "report a speed-up over the chain of 4 to 9%. Adaptive: each cycle chooses how many "
        "drafts, and between chain and tree.",
        table(
            {head: lambda row, i=i: row[i] for i, head in enumerate(heads)},
            [
                (who, target, at, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}×", speed)
                for who, target, at, a, b, speed in rows
            ],
        ),
    )


def _lengths(path: Path) -> list[str]:
    """Verify lengths by sequence against equal ones."""
    if not path.exists():
        return []
    found = read_records(path)

    def best(way: str, name: str, form: str) -> Callable[[Record], str]:
        return lambda record: format(_median(record, way, name), form)

    ways = ("equal lengths", "lengths by sequence")
    columns: Columns = {
        "target": field("target"),
        "sequences": field("batch"),
        "T": field("temperature", "g"),
        "plain, tokens/s": best("plain", "tokens_per_second", ",.0f"),
        **{
            f"{way}: speedup": lambda record, way=way: f"{_over_plain(record, way):.2f}×"
            for way in ways
        },
        **{f"{way}: acceptance length": best(way, "acceptance_length", ".2f") for way in ways},
        **{f"{way}: drafts a cycle": best(way, "drafts_per_cycle", ".2f") for way in ways},
    }
    return [
        "## Verify lengths by sequence",
        "Real text on the engine, as many sequences at a time as said; both ways choose depth or "
        "budget cycle by cycle by measured costs ([how](../engine.md)), so a budget is used only "
        "where it is expected to pay. Medians over rounds in turns.",
        table(columns, found),
        made(found),
        *remarks((record["environment"] for record in found), _LENGTHS_REMARKS),
    ]


def _median(record: Record, way: str, name: str) -> float:
    return statistics.median(each[name] for each in record["rounds"][way])


def _over_plain(record: Record, way: str) -> float:
    pace = "tokens_per_second"
    return _median(record, way, pace) / _median(record, "plain", pace)


def _trained(records: list[dict[str, Any]]) -> str:
    def rates(record: Record) -> str:
        tried = [r for r in records if r["stage"] == "search" and r["kind"] == record["kind"]]
        found = [f"{r['learning_rate']:g}: {r['held_out']['tokens_per_cycle']:.2f}" for r in tried]
        return f"**{record['learning_rate']:g}**" + (f" ({', '.join(found)})" if found else "")

    def if_trained(show: Any) -> Any:
        return lambda record: show(record) if "steps" in record else NONE  # not prompt lookup

    columns: Columns = {
        "drafter": lambda r: KINDS[r["kind"]],
        "parameters": if_trained(field("parameters", ",.1f", "M", scale=1e-6)),
        "seconds": if_trained(field("training_seconds", ".0f")),
        "steps": if_trained(field("steps", ",")),
        "learning rate (tried)": if_trained(rates),
        "drafts": if_trained(field("drafts")),
        "acceptance length, held out": field("held_out.tokens_per_cycle", ".2f"),
        "as packed": if_trained(field("packed.tokens_per_cycle", ".2f")),
    }
    return page(
        "Every trained drafter saw the same data for the same training time on the same card; "
        "compilation, evaluation and files are not counted. Learning rates were chosen by short "
        "runs, on held-out conversations other than those of this table. Medusa and EAGLE-3 use "
        "the target's lm_head and draft a chain, as all drafters do here "
        "([training](../training.md)).",
        table(columns, [record for record in records if record["stage"] == "full"]),
        made(records),
    )


@cache
def server_runs(records: Path) -> list[LoadSummary]:
    """Read and summarised once, which takes seconds."""
    return read_loads(records / "serving.jsonl.gz")


def serving(records: Path) -> str:
    """All runs of `domino bench serve` on record."""
    runs = server_runs(records)
    return page(
        "# The server under load",
        "`domino bench serve` from another process ([how](../bench.md#load-on-a-server)). "
        "*tokens/s* is from the first request to the end of the last answer, *full* while the "
        "concurrency was reached; ratios compare the sides of one run, measured in turns, with "
        "95% intervals by resampling rounds. *Per token* is an answer's mean after its first "
        "token.",
        *(part for run in runs for part in _load(run)),
        *remarks((run.facts["environment"] for run in runs), _SERVING_REMARKS),
        *_structured(records),
    )


def _structured(records: Path) -> list[str]:
    path = records / "structured-outputs.jsonl"
    if not path.exists():
        return []
    found = read_records(path)
    columns: Columns = {
        "requests": field("requests"),
        "at a time": field("concurrency"),
        "ended by themselves": field("with_drafts.ended_by_themselves"),
        "of these valid": field("with_drafts.valid"),
        "same text without drafts": field("equal_texts"),
        "acceptance length": field("with_drafts.tokens_per_cycle", ".2f"),
        "seconds": field("with_drafts.seconds", ".0f"),
        "seconds without drafts": field("without_drafts.seconds", ".0f"),
    }
    return [
        "## Structured outputs",
        "Greedy chats with a JSON schema each (four schemas in turn), of at most 64 tokens, to "
        "`domino serve` with SmolLM2-135M-Instruct in float32, its released CPU drafter at a fixed "
        "depth of 4 and 16 slots. At this batch a CPU is busy "
        "without drafts, so the times are no speedup: the point is that answers are valid and the "
        "same.",
        table(columns, found),
        made(found),
    ]


def _load(run: LoadSummary) -> list[str]:
    parts = [how_measured(run), circumstances(run.facts["environment"])]
    for shown in tables(run):
        columns = {head: _cell(place) for place, head in enumerate(shown.heads)}
        parts += [f"*{shown.title}*", table(columns, shown.lines)]
    return [*parts, " ".join(caveats(run))]


def _cell(place: int) -> Callable[[Sequence[str]], str]:
    return lambda line: line[place]


# vLLM -------------------------------------------------------------------------------------------

_PLAIN, _OURS = "plain", "ours"


def vllm(records: Path) -> str:
    """Real text on the small model, then a large shape with forced acceptance."""
    found = read_records(records / "vllm.jsonl")
    real = [r for r in found if r["set"] != "random"]
    forced = [r for r in found if r["set"] == "random"]
    version = next(r["vllm"] for r in found if "vllm" in r)
    return page(
        "# Domino on vLLM",
        f"vLLM {version}, unmodified, with the plugin: V2 runner, CUDA graphs, FlashAttention 3, "
        "bfloat16, no prefix caching, no detokenising. A closed loop keeps the concurrency; "
        "tokens/s are counted while it is reached. Each engine has its own process and the card to "
        "itself in its turn; one concurrency is measured on all of them before the next. *dspark* "
        "drafts 16 tokens, sampled where the request samples; *dflash* 15, greedy.",
        "## SmolLM2-135M-Instruct and its released drafter",
        "Prompts that plain decoding answers without looping; 256 new tokens; 12 requests or four "
        "times the concurrency, cycling through the prompts. Speedups by concurrency:",
        made_together(real),
        _ratios(real, {"set": field("set"), "T": field("temperature", "g")}),
        "At this size vLLM's own work on the host takes most of a step (2 ms for a model whose "
        "weights are read in 0.06 ms), so these ratios say more about it than about drafting; "
        "cells scatter (one measurement each). With 32 requests dspark falls behind plain "
        "decoding: 32 × 17 tokens are more than the largest CUDA graph vLLM captures by default "
        "(512). With `max_cudagraph_capture_size` of at least requests × (drafts + 1), as below, "
        "it does not.",
        "Acceptance length in vLLM (at its highest concurrency, where most prompts took part) and "
        "in our own decoder on the same prompts. The run ended before our own decoder was measured "
        "at T = 0.7:",
        _acceptance(real),
        "## Qwen3-8B's shape",
        "Random weights, random prompts of 128 tokens, 192 new tokens, a drafter of the public "
        "checkpoints' shape. **The acceptance length is forced** by vLLM's synthetic rejection "
        "sampling: 7.17 is what the paper reports for Qwen3-8B, 4.2 what it reports after training "
        "on ShareGPT alone. Speedups by concurrency (the paper's own on SGLang at 1, 2, 4, 8, 16, "
        "32: 5.8, 5.1, 4.7, 4.1, 3.0, 2.1):",
        made_together(forced),
        _ratios(forced, {"forced acceptance length": _forced}),
    )


def vllm_speedups(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """By forced acceptance length and method: the speedup at each concurrency."""
    runs = [record for record in records if record["variant"] != _OURS]
    plain = {r["concurrency"]: _pace(r) for r in runs if _method(r) == _PLAIN}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for record in runs:
        if _method(record) != _PLAIN:
            gains = found.setdefault((_forced(record), _method(record)), {})
            gains[record["concurrency"]] = _pace(record) / plain[record["concurrency"]]
    return found


def _ratios(records: list[dict[str, Any]], case: Columns) -> str:
    runs = [r for r in records if r["variant"] != _OURS]
    cases: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for record in runs:
        key = (*(show(record) for show in case.values()), _method(record))
        cases.setdefault(key, {})[record["concurrency"]] = record
    plain = {key[:-1]: found for key, found in cases.items() if key[-1] == _PLAIN}

    def cell(number: int) -> Any:
        def show(key: tuple[str, ...]) -> str:
            pace = _pace(cases[key][number])
            if key[-1] == _PLAIN:
                return f"{pace:,.0f} tokens/s"
            base = plain.get(key[:-1]) or next(iter(plain.values()))
            return f"{pace / _pace(base[number]):.2f}×"

        return show

    heads = [*case, "method"]
    columns: dict[str, Any] = {head: lambda key, at=at: key[at] for at, head in enumerate(heads)}
    numbers = sorted({r["concurrency"] for r in runs})
    return table(columns | {str(number): cell(number) for number in numbers}, cases)


def _acceptance(records: list[dict[str, Any]]) -> str:
    most = max(r["concurrency"] for r in records if r["variant"] != _OURS)
    found: dict[tuple[str, float], dict[str, float]] = {}
    for record in records:
        cell = found.setdefault((record["set"], record["temperature"]), {})
        if record["variant"] == _OURS:
            cell[_OURS] = record["tokens_per_cycle"]
        elif record["concurrency"] == most and record["cycles"]:
            cell[record["variant"]] = 1 + record["accepted"] / record["cycles"]

    def length(name: str) -> Any:
        return lambda key: f"{found[key][name]:.2f}" if name in found[key] else ""

    return table(
        {
            "set": lambda key: key[0],
            "T": lambda key: f"{key[1]:g}",
            "vLLM, dflash": length("dflash"),
            "vLLM, dspark": length("dspark"),
            "our decoder": length(_OURS),
        },
        found,
    )


def _method(record: Record) -> str:
    return str(record["variant"]).split()[0]


def _forced(record: Record) -> str:
    length = (record["speculative"] or {}).get("synthetic_acceptance_length")
    return "" if length is None else f"{length:g}"


def _pace(record: Record) -> float:
    return float(record["full_tokens"] / record["full_seconds"])
