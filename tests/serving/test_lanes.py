"""Lanes over real loops: what a turn leaves behind when it breaks off, and when rows leave."""

import pytest

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError
from domino_spec.serving.asks import Ask
from domino_spec.serving.jobs import Job
from domino_spec.serving.lanes import EngineLane, ReferenceLane, Results
from tests.engine.runs import make_engine, run_reference
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import make_rows

SHORT, LONG = random_prompts([5, 60])


def a_job(index, prompt, tokens, **params):
    params = SamplingParams(max_new_tokens=tokens, **params)
    (row,) = make_rows(make_target("llama"), [prompt], params)
    row.index = index
    return Job(Ask(prompt=tuple(prompt), params=params), row, 0, "me", lambda event: None)


def expected(prompt, tokens):
    target = make_target("llama")
    found = run_reference(target, None, [prompt], depth=0, candidates=None, max_new_tokens=tokens)
    return found[0][0]


def engine_lane(**options):
    engine = make_engine(make_target("llama"), random_drafter(), reuse=True, **options)
    return EngineLane(engine), engine


def ended(results):
    return [(job.row.index, commit.finish_reason) for job, commit in results.commits]


def test_a_cycle_that_fails_takes_nothing_back_that_its_turn_has_given(monkeypatch):
    lane, engine = engine_lane(slots=3)
    one_token, running = a_job(0, SHORT, 1), a_job(1, LONG, 9)
    for job in (one_token, running):
        lane.begin(job)

    def broken(*_):
        raise ZeroDivisionError

    results = Results()
    with monkeypatch.context() as patch:
        patch.setattr(engine.cycle, "run", broken)
        with pytest.raises(ZeroDivisionError):
            lane.turn(results)
    assert ended(results) == [(0, "length"), (1, None)]
    assert list(lane.jobs()) == [running]
    counted = []
    whole = engine.resize
    monkeypatch.setattr(
        engine, "resize", lambda **size: (counted.append(lane.slots), whole(**size))
    )
    lane.reset()
    assert counted == [3]  # requests that come meanwhile are not sent away
    assert (lane.running, lane.free, engine.free) == (0, 3, 3)


@pytest.mark.parametrize("ahead", [False, True])
def test_settling_leaves_nothing_under_way_and_loses_nothing(ahead):
    lane, engine = engine_lane(slots=2, ahead=ahead)
    job = a_job(0, SHORT, 12)
    lane.begin(job)
    heard = []
    while lane.running:
        for work in (lane.turn, lane.settle):
            results = Results()
            work(results)
            heard += [token for _, commit in results.commits for token in commit.tokens]
        assert not engine._flights
    assert heard == job.row.generated == expected(SHORT, 12)
    assert not engine.busy


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 3])
def test_who_leaves_leaves_nothing(turns, ahead):
    """In the midst of its prompt or of its answer, with a cycle under way or without."""
    lane, engine = engine_lane(slots=1, ahead=ahead)
    lane._chunk = 25
    gone = a_job(0, LONG, 30)
    lane.begin(gone)
    for _ in range(turns):
        lane.turn(Results())
    lane.release(gone)
    assert (lane.running, lane.free, engine.free) == (0, 1, 1)
    heard = list(gone.row.generated)
    other = a_job(1, LONG[:40] + SHORT, 9)
    lane.begin(other)
    while lane.running:
        results = Results()
        lane.turn(results)
        assert {job for job, _ in results.commits} <= {other}
    assert other.row.generated == expected(LONG[:40] + SHORT, 9)
    assert gone.row.generated == heard
    assert not lane._unread
    assert lane._reading is None


def test_what_no_engine_runs_fails_and_leaves_its_slot():
    lane, engine = engine_lane(slots=1)
    for odd in ({"temperature": 1.0, "accept": "match"}, {"processors": [lambda ids, s: s]}):
        lane.begin(a_job(0, SHORT, 5, **odd))
        results = Results()
        lane.turn(results)
        ((_, error),) = results.failures
        assert isinstance(error, InputError)
        assert "cannot run on the engine" in str(error)
        assert (lane.running, lane.free, engine.free) == (0, 1, 1)


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_a_row_leaves_the_reference_loop_and_the_next_begins(turns):
    decoder = DominoDecoder(make_target("llama"), random_drafter(), depth=3, engine="reference")
    lane = ReferenceLane(decoder, speculate=True)
    gone = a_job(0, SHORT, 50)
    lane.begin(gone)
    for _ in range(turns):
        lane.turn(Results())
    lane.release(gone)
    lane.release(gone)  # harmless
    assert lane.free == 1
    other = a_job(1, LONG, 6)
    lane.begin(other)
    while lane.running:
        lane.turn(Results())
    assert other.row.generated == expected(LONG, 6)


def test_a_failure_in_the_reference_loop_is_its_rows_own():
    decoder = DominoDecoder(make_target("llama"), None, engine="reference")
    lane = ReferenceLane(decoder, speculate=False)
    job = a_job(0, SHORT, 9)

    def bad(row):
        raise ZeroDivisionError

    job.row.stop_rules = [bad]
    lane.begin(job)
    results = Results()
    lane.turn(results)
    ((failed, error),) = results.failures
    assert failed is job
    assert isinstance(error, ZeroDivisionError)
    assert lane.free == 1


def test_a_prompt_that_was_being_read_when_a_cycle_failed_is_not_read_on(monkeypatch):
    lane, engine = engine_lane(slots=2)
    lane._chunk = 25
    running, reading = a_job(0, SHORT, 30), a_job(1, LONG, 9)
    lane.begin(running)
    lane.turn(Results())
    lane.begin(reading)

    def broken(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine.cycle, "run", broken)
        with pytest.raises(ZeroDivisionError):
            lane.turn(Results())
    lane.reset()
    again = a_job(2, LONG, 9)
    lane.begin(again)
    results = Results()
    while lane.running:
        lane.turn(results)
    assert {job for job, _ in results.commits} == {again}
    assert not results.failures
    assert again.row.generated == expected(LONG, 9)


def test_a_turn_reads_a_chunk_of_prompts_in_all():
    """However many wait: those who decode wait for no longer than that takes."""
    lane, _ = engine_lane(slots=4)
    lane._chunk = 25
    for index in range(4):
        lane.begin(a_job(index, LONG[index : index + 15], 50))
    begun = []
    for _ in range(2):
        results = Results()
        lane.turn(results)
        begun.append({job.row.index for job, commit in results.commits if not commit.cycle})
    assert begun == [{0, 1}, {2, 3}]
