"""The ablations' part of the results page."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import circumstances, table

HELD_OUT = "held-out"
HEADS = [
    "run", "steps", "ms a step, alone", "parameters", "held out", "head off", "against Domino",
    "gsm8k", "humaneval", "mt-bench",
]  # fmt: skip


def ablations(records: list[dict[str, Any]]) -> str:
    """Equal seconds, then equal steps, and what they say."""
    domino = next(r for r in records if r["label"] == "domino")
    timed = [r for r in records if "seconds" in r["budget"]]
    stepped = [domino, *(r for r in records if "steps_of" in r["budget"])]
    seconds = domino["budget"]["seconds"]
    return "\n".join(
        [
            "## Ablations",
            "",
            f"The same pool of data; {seconds} seconds of the card each, one thing changed at a "
            "time; tokens a cycle simulated on 128 held-out conversations and the first 32 "
            "prompts of each set (loops and short answers left out). Seconds a step were measured "
            "alone, then two runs at a time shared the card, each with the steps its seconds buy "
            "alone. *Head off* is the same drafter with its base logits only. These are short "
            "runs: a tenth of the release.",
            "",
            circumstances(records),
            "",
            f"Equal seconds ({seconds}):",
            "",
            table(HEADS, [_row(r, domino) for r in timed]),
            "",
            "Equal steps:",
            "",
            table(HEADS, [_row(r, domino) for r in stepped]),
            "",
            *_findings({r["label"]: r for r in records}),
            "",
        ]
    )


def _row(record: dict[str, Any], domino: dict[str, Any]) -> list[str]:
    found = record["tokens_per_cycle"]
    alone = record["seconds_a_step_alone"]
    return [
        record["name"],
        str(record["steps"]),
        f"{alone * 1e3:.1f}" if alone else "",
        f"{record['parameters'] / 1e6:.1f}M",
        f"{found[HELD_OUT]['on']:.2f}",
        f"{found[HELD_OUT]['off']:.2f}" if "off" in found[HELD_OUT] else "",
        _change(record, domino) if record is not domino else "",
        *(f"{found[name]['on']:.2f}" for name in ("gsm8k", "humaneval", "mt-bench")),
    ]


def _change(record: dict[str, Any], other: dict[str, Any]) -> str:
    ratio = _score(record) / _score(other)
    return f"{ratio - 1:+.1%}"


def _score(record: dict[str, Any], way: str = "on") -> float:
    return float(record["tokens_per_cycle"][HELD_OUT][way])


def _findings(runs: dict[str, dict[str, Any]]) -> list[str]:
    domino = runs["domino"]
    head = _score(domino) / _score(domino, "off") - 1
    return [
        "What the paper finds and what these runs find:",
        "",
        f"- the head: +20% there; here Domino is {_change(domino, runs['dflash'])} over DFlash at "
        f"equal seconds, {_change(domino, runs['dflash, steps of domino'])} at equal steps, and "
        f"{head:+.1%} over itself with the head off;",
        f"- the Markov head, which sees one token back: Domino is "
        f"{_change(domino, runs['markov'])} at equal seconds, "
        f"{_change(domino, runs['markov, steps of domino'])} at equal steps;",
        f"- the curriculum: +6% there; here {_change(domino, runs['no curriculum'])}: in so short "
        "a run the corrected logits get half the gradient they would have had.",
    ]
