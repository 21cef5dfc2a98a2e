"""Rebuilds docs/results.md from the raw records: every number there comes from a record here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.results_audit import audits
from benchmarks.results_engine import engine
from benchmarks.results_head_to_head import head_to_head
from benchmarks.results_serving import serving
from benchmarks.results_short import in_short
from benchmarks.results_training import training
from benchmarks.results_vllm import vllm
from benchmarks.tables import circumstances, table
from domino_spec.records import read_records

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "records"
PAGE = ROOT / "docs" / "results.md"
RELEASED = ROOT / "src" / "domino_spec" / "released"

HEAD = """# Results

Every number on this page is made from a raw record in `records/` by `make results`; a test checks
that page and records agree. Each table names its command, commit, hardware and date. Results that
disappoint stay. Speeds are ratios within one run: absolute times on shared machines say little.
"""


def page() -> str:
    """The whole page."""
    gpu = [
        record
        for dtype in ("float32", "bfloat16")
        for record in read_records(RECORDS / f"gpu_exactness_{dtype}.jsonl")
    ]
    return "\n".join(
        [
            HEAD,
            *filter(None, [in_short(RECORDS)]),
            training(RECORDS, RELEASED),
            *filter(None, [head_to_head(RECORDS)]),
            engine(
                read_records(RECORDS / "engine.jsonl"),
                read_records(RECORDS / "engine-tried.jsonl"),
                read_records(RECORDS / "engine-tilings.jsonl"),
                read_records(RECORDS / "engine-crowd.jsonl"),
            ),
            *filter(None, [serving(RECORDS)]),
            vllm(read_records(RECORDS / "vllm.jsonl")),
            *filter(None, [audits(read_records(RECORDS / "audit.jsonl"))]),
            exactness(read_records(RECORDS / "exactness.jsonl")),
            gpu_exactness(gpu),
        ]
    )


def exactness(records: list[dict[str, Any]]) -> str:
    """Greedy decoding against plain decoding on the real model, on a CPU."""
    rows = [
        [*_case(record), str(record["differing_prompts"]), f"{record['tokens_per_cycle']:.2f}"]
        for record in records
    ]
    heads = [*_CASE, "prompts that differ", "tokens a cycle"]
    return "\n".join(
        [
            "## Exactness on a real model, CPU",
            "",
            f"{records[0]['target']}: greedy tokens compared one by one with Transformers' own "
            "`generate`, one row and one token a forward. The scripted drafters (oracle, good, "
            "adversarial) know the answer and spoil it as named; the random ones are untrained "
            "drafters over real taps. A drafter that is always right commits 16 tokens a cycle, "
            "less for the last, cut block.",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )


def gpu_exactness(records: list[dict[str, Any]]) -> str:
    """The same on a GPU, where kernels round by the shape of a forward."""
    rows = [
        [
            record["target"].split(", ")[1],
            *_case(record),
            str(record["differing_prompts"]),
            str(record["proven_ties"]),
            f"{record['tokens_per_cycle']:.2f}",
        ]
        for record in records
    ]
    heads = ["type", *_CASE, "prompts that differ", "of these proven ties", "tokens a cycle"]
    return "\n".join(
        [
            "## Exactness on a real model, GPU",
            "",
            "SmolLM2-135M-Instruct, the same comparison. In bfloat16 a matrix product rounds "
            "differently for one token and for sixteen, alone and in a batch, so two tokens whose "
            "logits nearly tie can change places; from there on the texts differ. Plain decoding "
            "differs from itself in the same way when rows share a batch (drafter: none). A "
            "difference counts as a proven tie only if, at the first differing position, the two "
            "tokens' logits are closer than twice the largest difference measured there between "
            "single steps and the block and batch shapes that decoding uses. After a flip the "
            "scripted drafters script another text, which is why their tokens a cycle fall.",
            "",
            circumstances(records),
            "",
            table(heads, rows),
            "",
        ]
    )


_CASE = ["drafter", "rows a batch", "prompts × tokens"]


def _case(record: dict[str, Any]) -> list[str]:
    size = f"{record['prompts']} × {record['new_tokens']}"
    return [record["drafter"], str(record["rows"]), size]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is out of date")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
