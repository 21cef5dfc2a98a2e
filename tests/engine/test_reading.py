"""Prompts filled up and replayed give the text and the drafts of prompts read as they are."""

from itertools import pairwise

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine import reading
from domino_spec.engine.kernels.attention import batch_twin
from domino_spec.engine.reading import LENGTHS, Part, PromptReader
from domino_spec.engine.rows import Spans
from domino_spec.errors import InputError
from tests.engine.replays import Replays
from tests.engine.runs import make_engine, watch
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import make_rows

PROMPTS = random_prompts([1, 15, 16, 17, 40, 70, 100])
NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW)
SHORT = (4, 8, 24, 80)
"""Lengths as few tokens as tests have: the last one is more than a block of attention takes."""


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    monkeypatch.setattr(reading, "LENGTHS", SHORT)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def filling(engine, *, recorder=None):
    """The engine reads as on a GPU."""
    engine.reader = PromptReader(
        engine.target, engine.drafter, spare=engine.slots.spare, recorder=recorder, fill=True
    )
    return engine


def decoded(engine, prompt, params=GREEDY, *, chunk=2048):
    (row,) = make_rows(engine.slots, [prompt], params)
    admission = engine.begin(row, params, seed=5, chunk=chunk)
    admission.finish()
    while engine.busy:
        engine.step()
    return row.generated, admission.reused


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("chunk", [2048, 30, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_text_and_drafts_are_those_of_prompts_read_as_they_are(family, chunk, replayed):
    target, drafter = make_target(family), random_drafter()
    exact = make_engine(target, drafter, slots=2)
    wanted = watch(exact)
    expected = [decoded(exact, prompt)[0] for prompt in PROMPTS]
    recorder = Replays() if replayed else None
    engine = filling(make_engine(target, drafter, slots=2), recorder=recorder)
    blocks = watch(engine)
    assert [decoded(engine, prompt, chunk=chunk)[0] for prompt in PROMPTS] == expected
    assert blocks == wanted
    assert len(blocks) > 2 * len(PROMPTS)
    if replayed:
        assert 0 < len(recorder.outputs) < len(PROMPTS)  # only kinds that came again


def test_a_row_in_another_slot_is_not_touched():
    """Recording runs in the spare slot, and what fills a part up stays in its own."""
    target, drafter = make_target("llama"), random_drafter()
    long, short = PROMPTS[5], PROMPTS[3]
    alone = decoded(make_engine(target, drafter, slots=1), long)[0]
    engine = filling(make_engine(target, drafter, slots=2), recorder=Replays())
    (row,) = make_rows(engine.slots, [long], GREEDY)
    engine.begin(row, GREEDY, seed=5).finish()
    engine.step()
    decoded(engine, short)
    while engine.busy:
        engine.step()
    assert row.generated == alone


@pytest.mark.parametrize("replayed", [False, True])
def test_behind_a_beginning_that_was_there(replayed):
    target, drafter = make_target("llama"), random_drafter()
    engine = filling(
        make_engine(target, drafter, slots=1, reuse=True), recorder=Replays() if replayed else None
    )
    decoded(engine, PROMPTS[6])
    for kept, own in ((60, PROMPTS[4]), (30, PROMPTS[2]), (3, PROMPTS[5])):
        prompt = PROMPTS[6][:kept] + own
        text, reused = decoded(engine, prompt)
        assert reused >= min(kept, 30)
        assert text == decoded(make_engine(target, drafter, slots=1), prompt)[0]


def test_without_drafts_the_drafter_is_told_nothing():
    target, drafter = make_target("llama"), random_drafter()
    engine = filling(make_engine(target, drafter, slots=1), recorder=Replays())
    engine.speculates = False
    before = [part.clone() for part in engine.drafter.cache.layers]
    text, _ = decoded(engine, PROMPTS[4])
    assert text == decoded(make_engine(target, None, slots=1), PROMPTS[4])[0]
    assert all(map(torch.equal, before, engine.drafter.cache.layers))


def test_what_does_not_fit_is_read_as_it_is():
    engine = filling(make_engine(make_target("llama"), random_drafter(), slots=1, capacity=90))
    filled, capacity = engine.reader._filled, engine.target.cache.capacity
    assert filled(3, 0, observed=True) == Part(4, None, True)
    assert filled(25, 0, observed=True) == Part(80, 80, True)
    assert filled(25, 9, observed=False) == Part(80, min(128, capacity), False)
    assert filled(25, capacity - 30, observed=True) == Part(25, capacity - 5, True, common=False)
    assert filled(81, 0, observed=True) == Part(81, 81, True, common=False)
    exact = make_engine(make_target("llama"), None, slots=1).reader
    assert exact._filled(3, 0, observed=True) == Part(3, 3, False, common=False)


def test_a_prompt_that_ends_at_the_last_place_of_a_slot():
    target, drafter = make_target("llama"), random_drafter()
    prompt = random_prompts([84])[0]
    options = {"slots": 1, "capacity": len(prompt) + NEW}
    engine = filling(make_engine(target, drafter, **options), recorder=Replays())
    assert decoded(engine, prompt)[0] == decoded(make_engine(target, drafter, **options), prompt)[0]


def test_every_length_of_an_empty_slot_is_recorded_once():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, capacity=60)
    filling(engine, recorder=Replays())
    engine.capture(1, GREEDY)
    wanted = [Part(80, 80, True), Part(24, None, True), Part(8, None, True), Part(4, None, True)]
    assert list(engine.reader._captured) == wanted  # smaller ones fit into what the first took
    engine.capture(1, GREEDY)
    decoded(engine, PROMPTS[3])
    assert list(engine.reader._captured) == wanted


def test_only_what_comes_again_is_recorded():
    engine = filling(make_engine(make_target("llama"), None, slots=1), recorder=Replays())
    decoded(engine, PROMPTS[4])
    assert not engine.reader._captured
    decoded(engine, PROMPTS[3])
    assert not engine.reader._captured  # another length
    decoded(engine, PROMPTS[4])
    assert list(engine.reader._captured) == [Part(80, 80, False)]


def test_what_sees_much_is_not_recorded(monkeypatch):
    """What its attention needs would stay taken."""
    monkeypatch.setattr(reading, "_LONGEST", 100)
    engine = filling(make_engine(make_target("llama"), None, slots=1))
    assert engine.reader._filled(25, 9, observed=False) == Part(25, 34, False, common=False)
    assert engine.reader._filled(25, 0, observed=False) == Part(80, 80, False)


def test_where_a_graph_does_not_fit_prompts_are_read_all_the_same():
    class Full:
        asked = 0

        def record(self, _work):
            self.asked += 1
            raise torch.OutOfMemoryError("no more")

    target, full = make_target("llama"), Full()
    engine = filling(make_engine(target, random_drafter(), slots=1), recorder=full)
    wanted = decoded(make_engine(target, random_drafter(), slots=1), PROMPTS[4])
    assert [decoded(engine, PROMPTS[4]) for _ in range(4)] == [wanted] * 4
    assert full.asked == 1


def test_who_admits_a_row_is_told_of_a_restart():
    engine = filling(make_engine(make_target("llama"), random_drafter(), slots=1))
    (row,) = make_rows(engine.slots, [PROMPTS[4]], GREEDY)
    admission = engine.begin(row, GREEDY, seed=5, chunk=7)
    admission.advance()
    engine.restart()
    with pytest.raises(InputError, match="has left its slot"):
        admission.advance()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("start", [0, 13])
def test_a_bound_beyond_what_the_slot_holds_changes_nothing(window, start):
    """On a GPU prompts attend over a batch's caches, up to a bound."""
    make = torch.Generator().manual_seed(1)
    count, capacity = 20, 64
    query = torch.randn(1, count, 4, 8, generator=make)
    keys, values = torch.randn(2, 3, 2, capacity, 8, generator=make)
    slots, starts = torch.tensor([1]), torch.tensor([start])
    options = {"causal": True, "window": window, "scale": 0.3}
    expected = Spans(slots, starts, count).attend(query, keys, values, **options)
    for bound in (start + count, 40, capacity):
        found = batch_twin(query, keys, values, slots, starts, *options.values(), bound)
        assert torch.allclose(found, expected, atol=1e-5)


def test_lengths_grow_and_waste_little():
    assert list(LENGTHS) == sorted(LENGTHS)
    assert all(2 * one >= other for one, other in pairwise(LENGTHS))
