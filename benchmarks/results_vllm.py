"""vLLM's part of the results page."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import circumstances, table

PLAIN, OURS = "plain", "ours"


def vllm(records: list[dict[str, Any]]) -> str:
    """Real text on the small model, then a large shape with forced acceptance."""
    real = [r for r in records if r["set"] != "random"]
    forced = [r for r in records if r["set"] == "random"]
    version = {r["vllm"] for r in records if "vllm" in r}.pop()
    return "\n".join(
        [
            "## Domino on vLLM",
            "",
            f"vLLM {version}, unmodified, with the plugin: V2 runner, CUDA graphs, FlashAttention "
            "3, bfloat16, no prefix caching, no detokenising. A closed loop keeps so many requests "
            "in flight; tokens a second are counted while it is full. Each engine has a process of "
            "its own and the card to itself in its turn, and one concurrency is measured on all of "
            "them before the next. *dspark* drafts 16 tokens, sampled where the request samples; "
            "*dflash* 15, greedy.",
            "",
            "### SmolLM2-135M-Instruct and its released drafter",
            "",
            "Prompts that plain decoding answers without looping; 256 new tokens; 12 requests or "
            "four times the concurrency, over and over the prompts. Times over plain decoding:",
            "",
            circumstances(real),
            "",
            _ratios(real, ["set", "T"], lambda r: [r["set"], f"{r['temperature']:g}"]),
            "",
            "At this size vLLM's own bookkeeping on the host takes most of a step (2 ms for a "
            "model whose weights are read in 0.06 ms), so these ratios say more about it than "
            "about drafting; cells scatter (one measurement each). With 32 requests dspark "
            "falls behind plain decoding: 32 × 17 tokens are more than the largest graph vLLM "
            "captures by default (512), so it runs without one. With `max_cudagraph_capture_size` "
            "of at least requests × (drafts + 1), as below, it does not fall behind.",
            "",
            "Accepted by vLLM (at its highest concurrency, where most prompts took part) and by "
            "our own decoder on the same prompts, tokens a cycle. The run ended before our own "
            "decoder was measured at T = 0.7:",
            "",
            _acceptance(real),
            "",
            "### Qwen3-8B's shape",
            "",
            "Random weights, random prompts of 128 tokens, 192 new tokens, drafter of the public "
            "checkpoints' shape. **Acceptance is forced** by vLLM's synthetic rejection sampling: "
            "7.17 tokens a cycle is what the paper reports for Qwen3-8B, 4.2 what it reports after "
            "training on ShareGPT alone. Times over plain decoding (the paper's own on SGLang at "
            "concurrency 1, 2, 4, 8, 16, 32: 5.8, 5.1, 4.7, 4.1, 3.0, 2.1):",
            "",
            circumstances(forced),
            "",
            _ratios(forced, ["forced to"], lambda r: [_forced(r)]),
            "",
        ]
    )


def _ratios(records: list[dict[str, Any]], heads: list[str], case: Any) -> str:
    runs = [r for r in records if r["variant"] != OURS]
    numbers = sorted({r["concurrency"] for r in runs})
    rows: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for record in runs:
        key = (*case(record), _method(record))
        rows.setdefault(key, {})[record["concurrency"]] = record
    plain = {key[:-1]: found for key, found in rows.items() if key[-1] == PLAIN}
    shown = []
    for key, found in rows.items():
        if key[-1] == PLAIN:
            cells = [f"{_pace(found[n]):,.0f} tokens/s" for n in numbers]
        else:
            base = plain.get(key[:-1]) or next(iter(plain.values()))
            cells = [f"{_pace(found[n]) / _pace(base[n]):.2f}×" for n in numbers]
        shown.append([*key, *cells])
    return table([*heads, "method", *(f"{n} at once" for n in numbers)], shown)


def ratios(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """Over plain decoding by forced length, method and number of requests."""
    runs = [record for record in records if record["variant"] != OURS]
    plain = {r["concurrency"]: _pace(r) for r in runs if _method(r) == PLAIN}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for record in runs:
        if _method(record) != PLAIN:
            gains = found.setdefault((_forced(record), _method(record)), {})
            gains[record["concurrency"]] = _pace(record) / plain[record["concurrency"]]
    return found


def _acceptance(records: list[dict[str, Any]]) -> str:
    most = max(r["concurrency"] for r in records if r["variant"] != OURS)
    found: dict[tuple[str, float], dict[str, float]] = {}
    for record in records:
        cell = found.setdefault((record["set"], record["temperature"]), {})
        if record["variant"] == OURS:
            cell[OURS] = record["tokens_per_cycle"]
        elif record["concurrency"] == most and record["cycles"]:
            cell[record["variant"]] = 1 + record["accepted"] / record["cycles"]
    methods = ["dflash", "dspark", OURS]
    rows = [
        [name, f"{temperature:g}", *(f"{cell[m]:.2f}" if m in cell else "" for m in methods)]
        for (name, temperature), cell in found.items()
    ]
    return table(["set", "T", "vLLM, dflash", "vLLM, dspark", "our decoder"], rows)


def _method(record: dict[str, Any]) -> str:
    return str(record["variant"]).split()[0]


def _forced(record: dict[str, Any]) -> str:
    length = (record["speculative"] or {}).get("synthetic_acceptance_length")
    return "" if length is None else f"{length:g}"


def _pace(record: dict[str, Any]) -> float:
    return float(record["full_tokens"] / record["full_seconds"])
