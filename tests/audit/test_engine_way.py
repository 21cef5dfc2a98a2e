"""What the engine says of its forwards, and what its kernels say of a text by themselves."""

from types import SimpleNamespace

import pytest
import torch

from domino_spec.audit import EngineWay, Pass
from domino_spec.audit.forwards import PlainReader
from domino_spec.baselines.lean_lookup import LookupSource
from domino_spec.decoding import SamplingParams
from tests.engine.runs import make_engine
from tests.support.families import make_target, random_drafter, random_prompts


def test_the_engines_own_logits_are_those_of_known_text():
    target = make_target("llama")
    way = EngineWay(make_engine(target, random_drafter(), slots=3))
    ids = random_prompts((14,))[0]
    expected = PlainReader(target).read(ids)
    prompt, block = (Pass(start=0, width=n, rows=1, kept=n) for n in (14, 5))
    between = Pass(start=5, width=8, rows=2, kept=6)
    last = Pass(start=11, width=8, rows=8, kept=3)  # more rows than slots: it was filled up
    for passes, times in (([prompt], 1), ([block, between, last], 2)):
        found = list(way.own_logits(ids, passes))
        assert len(found) == times
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("ahead", [False, True])
def test_forwards_of_rows_that_come_and_go_are_told_as_they_were(ahead, monkeypatch):
    """Each with the rows that were in it, and the depth that was chosen for it."""
    engine = make_engine(make_target("llama"), LookupSource(depth=5), slots=2, ahead=ahead)
    depths, started = iter(range(10_000)), []
    engine.policy = SimpleNamespace(
        choose=lambda batch: next(depths) % 6, observe=lambda *_, **__: None
    )
    plain = engine._start

    def start(seats):
        plain(seats)
        depth = engine._flights[-1].plan.depth
        started.append(([seat.row.index for seat in seats], len(seats), depth + 1))

    monkeypatch.setattr(engine, "_start", start)
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=11)
    written = way.write(random_prompts((5, 9, 4, 7)), params, eos=())
    for index, text in enumerate(written):
        mine = [(rows, width) for seats, rows, width in started if index in seats]
        told = [(each.rows, each.width) for each in text.passes[1:]]
        assert told == mine[: len(told)]
        assert len(mine) - len(told) <= ahead  # one more may have started before its end was known
    assert {rows for _, rows, _ in started} == {1, 2}


def test_the_engine_is_left_as_it_was():
    """Reading a text again writes over slots, so nothing in them may be reused; nobody watches."""
    engine = make_engine(make_target("llama"), LookupSource(depth=3), slots=1, reuse=True)
    way, params = EngineWay(engine), SamplingParams(max_new_tokens=6)
    prompt, other = random_prompts((12, 12))
    (text,) = way.write([prompt], params, eos=())
    assert "start" not in vars(engine.runner)
    whole = Pass(start=0, width=len(other), rows=1, kept=len(other))
    assert len(list(way.own_logits(other, [whole]))) == 1
    assert way.write([prompt], params, eos=())[0].tokens == text.tokens
