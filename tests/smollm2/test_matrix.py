"""The full matrix (make test-slow): every kind of drafter, alone and in batches, on record."""

import dataclasses
import os
from pathlib import Path

import pytest

from domino_spec.demo import untrained_drafter
from domino_spec.drafter import DraftModel
from domino_spec.drafters import BlockDrafter
from domino_spec.records import append_record, environment
from tests.support.drafters import Adversarial, Good, Oracle
from tests.support.runs import run

pytestmark = pytest.mark.slow
DEPTH, NEW = 15, 128
SCRIPTED = {"oracle": Oracle, "good (4 in 5)": Good, "adversarial": Adversarial}
RANDOM = {
    "random Domino, shift": {"shift_label": True},
    "random Domino, no shift": {"shift_label": False},
    "random DFlash": {"shift_label": False, "head": None},
}


def make_proposer(kind, target):
    if kind in SCRIPTED:
        return SCRIPTED[kind]([], depth=DEPTH, vocab=target.vocab_size)
    config = dataclasses.replace(untrained_drafter(target).config, **RANDOM[kind])
    return BlockDrafter(DraftModel.untrained(config)).with_depth(DEPTH)


@pytest.fixture(scope="module")
def record():
    """Appends to records/exactness.jsonl, started anew, when DOMINO_RECORDS names a folder."""
    folder = os.environ.get("DOMINO_RECORDS")
    if folder is None:
        return lambda _: None
    path = Path(folder) / "exactness.jsonl"
    path.unlink(missing_ok=True)
    circumstances = {**environment(), "command": "make test-slow"}
    return lambda values: append_record(path, {**values, "environment": circumstances})


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", [*SCRIPTED, *RANDOM])
def test_exactness(kind, rows, loaded, prompts, answers, record):
    target = loaded.target
    proposer = make_proposer(kind, target)
    differing, cycles, committed = 0, 0, 0
    for first in range(0, len(prompts), rows):
        batch = slice(first, first + rows)
        if kind in SCRIPTED:
            proposer.answers = answers[batch]
        found, stats = run(target, proposer, prompts[batch], max_new_tokens=NEW)
        differing += sum(f != a for f, a in zip(found, answers[batch], strict=True))
        cycles += stats.acceptance.cycles
        committed += stats.acceptance.committed
    record(
        {
            "target": "SmolLM2-135M-Instruct, float32",
            "drafter": kind,
            "rows": rows,
            "prompts": len(prompts),
            "new_tokens": NEW,
            "differing_prompts": differing,
            "tokens_per_cycle": committed / cycles,
        }
    )
    assert differing == 0
