"""Tokens recorded before the engine was redesigned; float64, so any machine gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from domino_spec.baselines.lean import BaselineSource
from domino_spec.baselines.lean_lookup import LookupSource
from domino_spec.baselines.lookup import PromptLookup
from domino_spec.baselines.registry import baseline_proposer
from domino_spec.decoding import DominoProposer, SamplingParams, Sequence, decode
from domino_spec.decoding.stopping import at_length
from domino_spec.engine.engine import Engine
from tests.golden.pairs import FAMILIES, KINDS, SETTINGS, drafter_of, prompts, target_of

GOLDEN = json.loads((Path(__file__).parent / "tokens.json").read_text())
DEPTH = 4
CASES = [
    pytest.param(
        *(family, kind, name),
        marks=pytest.mark.slow if family == "qwen3" and name != "greedy" else (),
    )
    for family in FAMILIES
    for kind in KINDS
    for name in SETTINGS
]


def sequences(name: str) -> list[Sequence]:
    params = SamplingParams(**SETTINGS[name])
    return [
        Sequence(prompt, params, index=index, stop_rules=[at_length()])
        for index, prompt in enumerate(prompts())
    ]


def found(sequence: Sequence) -> dict:
    stats = sequence.stats
    counts = {"cycles": stats.cycles, "offered": stats.offered, "accepted": stats.accepted}
    return {"tokens": sequence.output, **counts}


@pytest.mark.parametrize(("family", "kind", "name"), CASES)
def test_the_reference_loop(family, kind, name):
    target, drafter = target_of(family), drafter_of(kind)
    if kind == "lookup":
        proposer = PromptLookup(depth=DEPTH)
    elif kind in ("medusa", "eagle3"):
        proposer = baseline_proposer(drafter, target, depth=DEPTH)
    else:
        proposer = DominoProposer(drafter, target, depth=DEPTH)
    every = sequences(name)
    for sequence in every:
        for _ in decode(target, proposer, [sequence]):
            pass
    assert [found(sequence) for sequence in every] == GOLDEN[f"{family} {kind} {name}"]


@pytest.mark.parametrize(("family", "kind", "name"), CASES)
def test_the_engine(family, kind, name):
    target, drafter = target_of(family), drafter_of(kind)
    source = drafter
    if kind == "lookup":
        source = LookupSource(depth=DEPTH)
    elif kind in ("medusa", "eagle3"):
        source = BaselineSource(drafter)
    engine = Engine(target, source, slots=2, capacity=64, depth=DEPTH)
    every = sequences(name)
    for _ in engine.stream(every):
        pass
    # The engine drafts a whole block at a sequence's end too: its last token may be a draft.
    golden = GOLDEN[f"{family} {kind} {name}"]
    for sequence, one in zip(every, golden, strict=True):
        assert sequence.output == one["tokens"]
        if kind == "lookup":  # it fills up what it does not find, and is right now and then
            assert sequence.stats.cycles <= one["cycles"]
            continue
        assert sequence.stats.cycles == one["cycles"]
        assert sum(sequence.stats.accepted) - sum(one["accepted"]) in (0, 1)
