"""The training part of the results page."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import circumstances, table
from domino_spec.records import read_records
from domino_spec.training.observers import read_log

PROTOTYPE = {"soft": 233, "hard": 312}
"""Conversations a second of the throwaway prototype that the targets were set with, H200."""


MISSING = """## Not measured yet

Domino against DFlash and the Markov head, curriculum, hard labels, late total variation and Muon,
at equal seconds and at equal steps (`benchmarks/plans/ablations.yaml` is ready to run); training at
Qwen3-4B's shape with a vocabulary of 150k (`python -m benchmarks.training_speed qwen3-4b --steps 20
--set rows=4 length=3072 anchors=256`); the released drafters at temperature 0.7. So the default of
soft labels rests on the prototype's experience, not on a record here.
"""


def training(records: Path, released: Path) -> str:
    """All sections that have records."""
    parts = [
        _acceptance(read_records(records / "acceptance.jsonl")),
        _storage(read_records(records / "storage.jsonl")),
        _runs(
            read_records(records / "release.jsonl"),
            read_records(records / "refit.jsonl")[0],
            released,
        ),
        _speed(read_records(records / "training-speed.jsonl")),
        _flex(read_records(records / "flex.jsonl")),
        MISSING,
    ]
    return "\n".join(parts)


def _acceptance(records: list[dict[str, Any]]) -> str:
    lines = [
        "## Tokens a cycle of the released drafters",
        "",
        "First turn of each prompt under 400 tokens, 256 new tokens, answers of at least 32 "
        "tokens, looping answers left out (fewer than half distinct 4-grams); all committed tokens "
        "over all cycles, the prefill's token not counted; block size - 1 drafts. *Simulated* "
        "counts what greedy decoding would do, from the target's own answers; *decoded* is the "
        "decoder itself.",
        "",
    ]
    commands: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        commands.setdefault(str(record["environment"]), []).append(record)
    for group in commands.values():
        rows = [
            [
                r["drafter"],
                r["set"],
                f"{r['protocol']['temperature']:g}",
                r["way"],
                str(r["depth"]),
                "on" if r["head"] else "off",
                f"{r['tokens_per_cycle']:.2f}",
                f"{r['used']} ({r['loops']} loops, {r['short']} short, {r['too_long']} long)",
            ]
            for r in group
        ]
        heads = ["drafter", "set", "T", "way", "drafts", "head", "tokens a cycle", "prompts used"]
        lines += [f"{group[0]['target']}. {circumstances(group)}", "", table(heads, rows), ""]
    return "\n".join(lines)


def _storage(records: list[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(r["set"] for r in records))
    found = {(r["drafter"], r["set"]): f"{r['tokens_per_cycle']:.2f}" for r in records}
    rows = [[d, *(found[d, s] for s in sets)] for d in dict.fromkeys(r["drafter"] for r in records)]
    used = {r["set"]: r["used"] for r in records}
    heads = ["main drafter stored as", *(f"{s} ({used[s]} prompts)" for s in sets)]
    return "\n".join(
        [
            "### What packing costs",
            "",
            "The same measurement on the first 16 prompts of two sets, simulated. In 8 bits the "
            "main drafter would be larger than the 24 MB it may take in this repository.",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )


def _runs(records: list[dict[str, Any]], refit: dict[str, Any], released: Path) -> str:
    rows = []
    for record in records:
        log = read_log(released / record["name"] / "log.jsonl")
        trained = [r for r in log if "loss" in r]
        evaluated = [r for r in log if "tokens_per_cycle" in r]
        rate = median(r["conversations_per_second"] for r in trained[1:])
        last = evaluated[-1]
        rows.append(
            [
                record["name"],
                f"{record['parameters'] / 1e6:.1f}M",
                str(record["steps"]),
                f"{record['training_seconds']:.0f}",
                f"{rate:.0f}",
                f"{max(r['peak_memory_bytes'] for r in trained) / 2**30:.1f} GiB",
                f"{trained[-1]['run_length']:.2f}",
                f"{last['tokens_per_cycle']:.2f}",
                f"{last['tokens_per_cycle_head_off']:.2f}",
            ]
        )
    heads = [
        "run", "parameters", "steps", "seconds", "conversations a second",
        "peak memory of the process", "right in a row, teacher forced",
        "held out, head on", "held out, head off",
    ]  # fmt: skip
    return "\n".join(
        [
            "## The release runs",
            "",
            "Seconds include compiling (the first report of each log); the speed is the median of "
            f"the later reports. The prototype reached {PROTOTYPE['soft']} conversations a second "
            f"with soft labels ({PROTOTYPE['hard']} with hard ones) on the same card and about the "
            "same blocks a conversation (handed down, not a record here). *Right in a row* "
            "counts among the tokens that can be drafted: of the CPU drafter's 8192 that says more "
            "than it seems.",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
            "The *main* drafter as released is not quite the one in this table: its head's output "
            "matrix was lost on the way from the GPU machine (one file over a size limit) and was "
            "fitted again on a CPU, everything else frozen, by `benchmarks.refit_output` (see "
            "`src/domino_spec/released/smollm2-135m-instruct/README.md`). The tokens a cycle above "
            "on this page are measured on what is released. On the run's own "
            f"{refit['prompts']} held-out prompts the released drafter gives "
            f"{refit['tokens_per_cycle']:.2f} tokens a cycle (head off "
            f"{refit['tokens_per_cycle_head_off']:.2f}; float32 on a CPU, packed).",
            "",
        ]
    )


def _speed(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["target"],
            r["labels"],
            f"{r['rows']} × {r['length']}",
            str(r["anchors"]),
            f"{r['conversations_per_second']:.0f}",
            f"{r['peak_memory_gib']:.1f} GiB",
            f"{r['share_of_peak']:.0%}",
            ", ".join(f"{k} {v:.0%}" for k, v in r["stage_share"].items()),
        ]
        for r in records
    ]
    heads = ["target", "labels", "rows × tokens", "blocks a row", "conversations a second",
             "peak memory", "share of peak", "where the device's time goes"]  # fmt: skip
    return "\n".join(
        [
            "## Where a training step's time goes",
            "",
            "Before the loss was rewritten to pass over the logits twice instead of four times; "
            "the speed includes the profiler's own time. The backward pass is the backbone's and "
            "the head's: the loss computes its gradients with itself.",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )


def _flex(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["layers"],
            r["dtype"],
            *(
                f"{r[name]:.1e}"
                for name in (
                    "dense_output_error", "flex_output_error", "dense_gradient_error",
                    "flex_gradient_error",
                )
            ),
        ]
        for r in records
    ]  # fmt: skip
    heads = ["layers", "type", "dense, output", "flex, output", "dense, gradients",
             "flex, gradients"]  # fmt: skip
    return "\n".join(
        [
            "## FlexAttention against the dense mask",
            "",
            "Packed rows in SmolLM2's shape; relative errors against the dense mask in float32 "
            "(outputs: the whole tensor; gradients: the worst parameter).",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )
