"""Rows come, are read, decode and leave in any order; what each writes is the reference loop's."""

import random
from functools import cache

import pytest

from tests.engine.crowd import Alone, Crowd
from tests.engine.runs import make_engine
from tests.support.families import make_target, random_drafter

TURNS = 110


@cache
def alone():
    return Alone(make_target("llama"))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_any_order_gives_what_each_row_gives_alone(seed, ahead):
    engine = make_engine(
        make_target("llama"), random_drafter(), slots=2 + seed % 3, ahead=ahead, reuse=True
    )
    crowd = Crowd(engine, random.Random(seed), alone())
    crowd.run(TURNS)
    crowd.check()
    assert engine.free == engine.slots.count
    assert crowd.reused > 2
    assert len(crowd.rows) - len(crowd.gone) > 2
