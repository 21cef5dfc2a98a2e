"""The head-to-head's part of the results page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import remarks, table
from domino_spec.bench import markdown, read_runs
from domino_spec.bench.tables import KINDS, circumstances
from domino_spec.records import read_records

FILES = "head-to-head*.jsonl"
TRAINED = "head_to_head_train.jsonl"
"""What `benchmarks.head_to_head_train` writes."""


def head_to_head(records: Path) -> str:
    """All runs on file, made by `domino bench`; nothing where there are none."""
    files = sorted(records.glob(FILES))
    if not files:
        return ""
    trained = records / TRAINED
    return "\n".join(
        [
            "## Head-to-head",
            "",
            "Drafters against plain decoding by `domino bench` ([how](bench.md)); *speedup* is "
            "tokens a second from the prompt to the last token, *decode speedup* leaves the "
            "prompt's reading out. The same records as a page with charts: "
            f"`domino report {' '.join(f'records/{path.name}' for path in files)}`.",
            "",
            *([_training(read_records(trained)), ""] if trained.exists() else []),
            markdown(read_runs(files)),
            "",
            *remarks((each["environment"] for p in files for each in read_records(p)), _REMARKS),
        ]
    )


_REMARKS = {
    "79ae83f04cc7": (
        "In half precision batches of more than 16 tokens go through the vendor's library on the "
        "H200, which rounds by shape, so that most texts of 16 rows part from plain decoding's "
        "(the audits below judge such places one by one); alone, every text is the same. Drafts "
        "gain less with 16 rows than in the records at cc8f729 (1.43 and 1.12 times): plain steps "
        "of 16 tokens are products of few rows, which are launched early since, and became about a "
        "seventh faster; longer blocks are the vendor's.\n\n"
        "All kinds run on the engine in the head-to-head, each cycle's depth being what pays on "
        "the card. A target this small is read in less than a millisecond, so what a drafter takes "
        "weighs as much as what it gives. Over all tasks EAGLE-3's and Domino's tokens a cycle are "
        "the most at T 0, Domino's at T 0.7; but their cycles take longer than DFlash's, whose "
        "drafts need no steps. Domino and DFlash are level at T 0, and within each other's "
        "intervals at T 0.7."
    ),
    "52caea21666b": (
        "On the CPU each cycle's depth is what pays there, so tokens a cycle are not what a "
        "drafter could give: verifying costs much, drafts are few, and a small drafter gains on a "
        "good one. Prompt lookup verifies as many tokens where it found nothing to draft."
    ),
}
"""What is to be said of runs at a commit; it goes when they are made again."""


def _training(records: list[dict[str, Any]]) -> str:
    """How the drafters came about: the same data and seconds, the steps that these bought."""
    full = [r for r in records if r["stage"] == "full"]
    heads = ["drafter", "parameters", "seconds", "steps", "learning rate, tried on the search half",
             "drafts", "tokens a cycle, held out", "as packed"]  # fmt: skip
    lines = dict.fromkeys(circumstances(r["environment"]) for r in records)
    return "\n".join(
        [
            "Every trained drafter saw the same data for the same seconds of training on the same "
            "card; the compiler, evaluations and files are not counted. A learning rate was chosen "
            "by short runs, on held-out conversations other than those of this table. Medusa and "
            "EAGLE-3 borrow the target's lm_head and draft a chain, as all do here "
            "([training.md](training.md)).",
            "",
            table(heads, [_trained_row(record, records) for record in full]),
            "",
            " ".join(lines),
        ]
    )


def _trained_row(record: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    kind, held_out = record["kind"], f"{record['held_out']['tokens_per_cycle']:.2f}"
    if "steps" not in record:  # prompt lookup
        return [KINDS[kind], "–", "–", "–", "–", "–", held_out, "–"]
    tried = [r for r in records if r["stage"] == "search" and r["kind"] == kind]
    rates = ", ".join(
        f"{r['learning_rate']:g}: {r['held_out']['tokens_per_cycle']:.2f}" for r in tried
    )
    return [
        KINDS[kind],
        f"{record['parameters'] / 1e6:,.1f}M",
        f"{record['training_seconds']:.0f}",
        f"{record['steps']:,}",
        f"**{record['learning_rate']:g}**" + (f" ({rates})" if rates else ""),
        str(record["drafts"]),
        held_out,
        f"{record['packed']['tokens_per_cycle']:.2f}",
    ]
