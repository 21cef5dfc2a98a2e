"""The results page's section on audits: what `domino audit` found on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import circumstances, remarks, table

REMARKS: dict[str, str] = {}
"""What is to be said of audits at a commit; it goes when they are made again."""
_LOOPS = {"fast": "engine", "reference": "reference loop"}


def audits(records: list[dict[str, Any]]) -> str:
    """Empty without records."""
    if not records:
        return ""
    parts = [
        "## Audits",
        "",
        f"`domino audit` on {records[0]['target']}: greedy tokens against the model's own plain "
        "decoding, one by one; samples against its own probabilities. An answer may end before it "
        "has all the tokens asked for. A near-tie is proved, never assumed (docs/audit.md).",
        "",
        *(f"- {circumstances([record])}" for record in records),
        "",
    ]
    greedy = [record for record in records if record["greedy"]]
    if greedy:
        heads = [
            "drafter",
            "loop",
            "prompts",
            "tokens compared",
            "tokens that differ",
            "near-ties",
            "unclear",
            "bugs",
        ]
        parts += [table([*heads, "tokens a cycle", "answer"], list(map(_greedy, greedy))), ""]
        parts += remarks((record["environment"] for record in greedy), REMARKS)
    sampled = [record for record in records if record["sampling"]]
    if sampled:
        heads = ["drafter", "loop", "samples a prompt", "places", "temperature", "wrong places"]
        heads += ["total variation found nine times in ten", "answer"]
        parts += [table(heads, list(map(_sampled, sampled))), ""]
    return "\n".join(parts)


def _greedy(record: dict[str, Any]) -> list[str]:
    found = record["greedy"]
    return [
        *_case(record),
        f"{found['prompts']} ({Path(record['prompts']).stem}) × {record['new_tokens']}",
        str(found["tokens"]),
        str(len(found["differences"])),
        str(found["ties"]),
        str(found["unclear"]),
        str(found["bugs"]),
        f"{found['tokens_per_cycle']:.2f}",
        record["answer"],
    ]


def _sampled(record: dict[str, Any]) -> list[str]:
    found = record["sampling"]
    return [
        *_case(record),
        str(found["samples"]),
        str(len(found["places"])),
        str(found["temperature"]),
        str(found["wrong"]),
        "too few samples" if found["detectable"] is None else f"{found['detectable']:.2f}",
        record["answer"],
    ]


def _case(record: dict[str, Any]) -> list[str]:
    return [record["drafter"], f"{_LOOPS[record['engine']]}, {record['device']}, {record['dtype']}"]
