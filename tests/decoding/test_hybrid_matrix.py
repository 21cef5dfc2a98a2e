"""The full matrix on hybrid targets (make test-slow): every kind of drafter, five seeds."""

import os
from functools import cache
from pathlib import Path

import pytest

from domino_spec.audit import ReferenceWay, audit_greedy
from domino_spec.decoding import AcceptanceStats
from domino_spec.drafters import BlockDrafter
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, probe_target
from domino_spec.targets.recurrent import RecurrentStates
from tests.engine.runs import draft, make_engine, run_engine
from tests.support.drafters import Adversarial, Good, Oracle, WrongAtFourth
from tests.support.families import (
    HYBRIDS,
    VOCAB,
    make_model,
    plain_greedy,
    random_drafter,
    random_prompts,
)
from tests.support.runs import run

pytestmark = pytest.mark.slow
DEPTH, NEW, SEEDS = 7, 128, range(5)
LENGTHS = tuple(range(3, 83, 4))  # twenty prompts, the longest past one chunk of the kernels
SCRIPTED = {
    "oracle": Oracle,
    "good (4 in 5)": Good,
    "wrong at the fourth": WrongAtFourth,
    "adversarial": Adversarial,
}
CASES = [(kind, 7) for kind in (*SCRIPTED, "random Domino")] + [("adversarial", 1)]
NAMES = {"qwen3_next": "Qwen3-Next", "qwen3_5_text": "Qwen3.5"}


@cache
def case(family, seed):
    """A target, prompts, and what Transformers' own `generate` writes after them."""
    target = Target(make_model(family, seed=seed), name=family)
    probe_target(target)
    prompts = random_prompts(LENGTHS, seed=seed)
    return target, prompts, [plain_greedy(target.model, prompt, NEW) for prompt in prompts]


def make_proposer(kind, answers, seed):
    if kind in SCRIPTED:
        return SCRIPTED[kind](answers, depth=DEPTH, vocab=VOCAB)
    return BlockDrafter(random_drafter(seed=seed)).with_depth(DEPTH)


@pytest.fixture(scope="module")
def record():
    """Appends to records/exactness-hybrids.jsonl, started anew, if DOMINO_RECORDS is a folder."""
    folder = os.environ.get("DOMINO_RECORDS")
    if folder is None:
        return lambda _: None
    path = Path(folder) / "exactness-hybrids.jsonl"
    path.unlink(missing_ok=True)
    circumstances = {**environment(), "command": "make test-slow"}

    def append(family, values):
        name = f"random tiny {NAMES[family]}, float32"
        common = {"target": name, "seeds": len(SEEDS), "prompts": len(LENGTHS), "new_tokens": NEW}
        append_record(path, {**common, **values, "environment": circumstances})

    return append


@pytest.mark.parametrize("family", HYBRIDS)
def test_exactness(family, record):
    for kind, rows in CASES:
        differing, cycles, committed, distinct = 0, 0, 0, 0
        for seed in SEEDS:
            target, prompts, answers = case(family, seed)
            for first in range(0, len(prompts), rows):
                batch = slice(first, first + rows)
                proposer = make_proposer(kind, answers[batch], seed)
                found, stats = run(target, proposer, prompts[batch], max_new_tokens=NEW)
                differing += sum(f != a for f, a in zip(found, answers[batch], strict=True))
                cycles += stats.acceptance.cycles
                committed += stats.acceptance.committed
                distinct += sum(len(set(text)) for text in found)
        values = {
            "loop": "reference",
            "drafter": kind,
            "rows": rows,
            "differing_prompts": differing,
            "tokens_per_cycle": committed / cycles,
            "distinct_tokens": distinct / (len(SEEDS) * len(LENGTHS)),
        }
        record(family, values)
        assert differing == 0, values


@pytest.mark.parametrize("slots", [1, 7])
@pytest.mark.parametrize("family", HYBRIDS)
def test_exactness_on_the_engine(family, slots, record):
    """Twenty prompts, in turns; the states of seven advance by different numbers together."""
    for kind in SCRIPTED:
        differing, distinct, total = 0, 0, AcceptanceStats()
        for seed in SEEDS:
            target, prompts, answers = case(family, seed)
            spoil = SCRIPTED[kind](answers, depth=DEPTH, vocab=VOCAB).spoil

            def drafts_of(index, done, answers=answers, spoil=spoil):
                known = answers[index][done:]
                return [spoil(done, place, token) for place, token in enumerate(known)]

            engine = make_engine(target, random_drafter(), slots=slots, capacity=256, chunk=40)
            draft(engine, drafts_of)
            found, counts, _ = run_engine(engine, prompts, max_new_tokens=NEW)
            differing += sum(f != a for f, a in zip(found, answers, strict=True))
            distinct += sum(len(set(text)) for text in found)
            total.add(counts)
            assert counts.cycles < counts.committed
        values = {
            "loop": "fast",
            "drafter": kind,
            "rows": slots,
            "differing_prompts": differing,
            "tokens_per_cycle": total.tokens_per_cycle,
            "distinct_tokens": distinct / (len(SEEDS) * len(LENGTHS)),
        }
        record(family, values)
        assert differing == 0, values


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("family", HYBRIDS)
def test_audit(family, restored, record, monkeypatch):
    """It passes; it finds a bug in every text where states are not restored."""
    if not restored:
        monkeypatch.setattr(RecurrentStates, "commit", lambda self, counts: None)
    counts = {"tokens": 0, "ties": 0, "bugs": 0, "unclear": 0, "differing_prompts": 0}
    for seed in SEEDS:
        target, prompts, answers = case(family, seed)
        proposer = make_proposer("adversarial", answers, seed)
        way = ReferenceWay(target, proposer, batch_size=len(prompts))
        found = audit_greedy(target, way, prompts, max_new_tokens=NEW, eos=()).to_dict()
        counts = {name: counts[name] + found[name] for name in counts}
    values = {"loop": "reference", "drafter": "adversarial", "rows": len(LENGTHS)}
    record(family, {**values, "restored": restored, **counts})
    differing = {name: counts[name] for name in ("ties", "bugs", "unclear")}
    if restored:
        assert differing == {"ties": 0, "bugs": 0, "unclear": 0}
    else:
        assert differing == {"ties": 0, "bugs": len(SEEDS) * len(LENGTHS), "unclear": 0}
