"""Tokens recorded before the engine was redesigned; float64, so any machine gives them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from domino_spec.decoding import Drafter, SamplingParams, Sequence, decode
from domino_spec.decoding.stopping import at_length
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.engine.engine import Engine
from tests.golden.pairs import FAMILIES, KINDS, SETTINGS, model_of, prompts, target_of

GOLDEN = json.loads((Path(__file__).parent / "tokens.json").read_text())
DEPTH = 4
# Each kind once, each way of sampling with two; the rest with `slow`.
QUICK = {
    *(("llama", kind, "sampled") for kind in ("markov", "eagle3")),
    *(("llama", kind, "filtered") for kind in ("domino", "lookup")),
    *(("qwen3", kind, "greedy") for kind in ("dflash", "medusa")),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(FAMILIES, KINDS, SETTINGS)
]


def sequences(name: str) -> list[Sequence]:
    params = SamplingParams(**SETTINGS[name])
    return [
        Sequence(prompt, params, index=index, stop_rules=[at_length()])
        for index, prompt in enumerate(prompts())
    ]


def opened(kind: str) -> Drafter:
    model = model_of(kind)
    drafter = LookupDrafter() if model is None else drafter_of(model)
    return drafter.with_depth(DEPTH)


def found(sequence: Sequence) -> dict:
    stats = sequence.stats
    counts = {"cycles": stats.cycles, "offered": stats.offered, "accepted": stats.accepted}
    return {"tokens": sequence.output, **counts}


@pytest.mark.parametrize(("family", "kind", "name"), CASES)
def test_the_reference_loop(family, kind, name):
    target, drafter = target_of(family), opened(kind)
    every = sequences(name)
    for sequence in every:
        for _ in decode(target, drafter, [sequence]):
            pass
    assert [found(sequence) for sequence in every] == GOLDEN[f"{family} {kind} {name}"]


@pytest.mark.parametrize(("family", "kind", "name"), CASES)
def test_the_engine(family, kind, name):
    engine = Engine(target_of(family), opened(kind), slots=2, capacity=64)
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
