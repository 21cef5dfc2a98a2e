"""Random arrivals and aborts: each sequence gets what the reference loop gives it alone."""

import random
from functools import cache

import pytest

from tests.engine.runs import make_engine
from tests.engine.stress import KINDS, Alone, StressTest, disturbed_target, drafter_for, table_for
from tests.support.families import make_target, random_drafter
from tests.support.pair import SIZE

TURNS = 80


@cache
def alone(kind):
    if kind is None:
        return Alone(make_target("llama"))
    return Alone(disturbed_target(table_for(kind, SIZE), disturbance=0.3))


def stress(kind, drafter, seed, **options):
    known = alone(kind)
    slots, chunk = 2 + seed % 3, (7, 2048, 1)[seed % 3]
    engine = make_engine(
        known.target, drafter, slots=slots, chunk=chunk, reuse=seed % 4 != 3, **options
    )
    test = StressTest(engine, random.Random(seed), known, scripted=kind is None)
    test.run(TURNS)
    test.check()
    assert len(test.sequences) - len(test.aborted) > 8
    assert len(test.aborted) > 1
    assert (test.reused > 2) is (seed % 4 != 3)
    drafting = [sequence.stats for sequence in test.sequences if sequence.speculate]
    # Drafts were accepted, and rejected.
    assert 10 < sum(sum(s.accepted) for s in drafting) < sum(sum(s.offered) for s in drafting)
    assert 0 < len(drafting) < len(test.sequences)


PAGED = {"page": 8, "tokens": 192}
"""Pages for one long sequence, or some short ones: others wait, or sit out."""


@pytest.mark.parametrize("paged", [pytest.param({}, marks=pytest.mark.slow), PAGED])
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_drafts_that_are_mostly_right(seed, paged):
    stress(None, random_drafter(), seed, ahead=seed % 2 == 0, **paged)


@pytest.mark.parametrize(("kind", "ahead", "paged"), [
    ("domino", False, {}), ("eagle3", True, PAGED), ("lookup", False, PAGED),
    *(pytest.param(*each, marks=pytest.mark.slow)
      for each in (
          ("domino", True, PAGED), ("markov", True, PAGED), ("medusa", False, PAGED),
          ("eagle3", True, {}), ("lookup", False, {}), ("medusa", False, {}),
      )),
])  # fmt: skip
def test_every_kind_of_drafter(kind, ahead, paged):
    drafter = drafter_for(kind, table_for(kind, SIZE))
    stress(kind, drafter, KINDS.index(kind) + 6 * ahead + 1, ahead=ahead, **paged)


def test_caches_that_grow_with_the_requests():
    known = alone(None)
    engine = make_engine(known.target, random_drafter(), slots=None, capacity=None)
    test = StressTest(engine, random.Random(5), known, scripted=True)
    test.run(60)
    test.check()
    assert engine.slots.count > 1
