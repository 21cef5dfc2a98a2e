"""Rows come in chunk by chunk while others decode; one that fails takes nobody along."""

import pytest

from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError
from tests.engine.runs import make_engine, run_engine, run_reference, watch
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.runs import make_rows

SHORT, LONG, OTHER = random_prompts([5, 45, 9])
PARAMS = SamplingParams(max_new_tokens=20)


def expected(*prompts, target=None):
    target = target or make_target("llama")
    return run_reference(target, None, prompts, depth=0, candidates=None, max_new_tokens=20)[0]


def finish(engine):
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("chunk", [1, 16, 44, 45, 2048])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_read_in_chunks_gives_the_same_text_and_drafts(family, chunk):
    target, drafter = make_target(family), random_drafter()
    whole, counts, drafts = run_engine(make_engine(target, drafter), [LONG], max_new_tokens=20)
    engine = make_engine(target, drafter)
    found = watch(engine)
    (row,) = make_rows(engine.slots, [LONG], PARAMS)
    admission = engine.begin(row, PARAMS, chunk=chunk)
    assert (admission.row, admission.reused, admission.remaining) == (row, 0, 45)
    advances = 1
    while admission.advance() is None:
        assert admission.remaining == 45 - advances * chunk
        advances += 1
    assert advances == -(-45 // chunk)
    finish(engine)
    assert row.generated == whole[0] == expected(LONG, target=target)[0]
    assert found == drafts
    assert row.stats == counts


@pytest.mark.parametrize("ahead", [False, True])
def test_others_decode_between_two_chunks(ahead):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, ahead=ahead)
    first, second = make_rows(engine.slots, [SHORT, LONG], PARAMS)
    engine.admit(first, PARAMS)
    admission = engine.begin(second, PARAMS, chunk=10)
    assert (engine.running, engine.free, engine.busy) == (2, 0, True)
    between = []
    while admission.advance() is None:
        between += engine.advance().commits
    assert len(between) == (4 if not ahead else 3)
    assert {commit.row for commit in between} == {first.index}
    assert second.generated
    finish(engine)
    assert [first.generated, second.generated] == expected(SHORT, LONG)
    assert (engine.running, engine.free, engine.busy) == (0, 2, False)


def test_the_last_chunk_gives_the_first_commit_and_ends_a_row_of_one_token():
    engine = make_engine(make_target("llama"), None, slots=1)
    params = SamplingParams(max_new_tokens=1)
    (row,) = make_rows(engine.slots, [SHORT], params)
    admission = engine.begin(row, params, chunk=3)
    assert admission.advance() is None
    commit = admission.advance()
    assert (commit.tokens, commit.cycle) == (tuple(expected(SHORT)[0][:1]), 0)
    assert commit.finish_reason == "length"
    assert engine.free == 1
    with pytest.raises(InputError, match="has left its slot"):
        admission.advance()


def test_what_is_being_admitted_is_admitted_once():
    engine = make_engine(make_target("llama"), None, slots=2)
    (row,) = make_rows(engine.slots, [SHORT], PARAMS)
    admission = engine.begin(row, PARAMS)
    with pytest.raises(InputError, match="being admitted already"):
        engine.begin(row, PARAMS)
    admission.advance()
    with pytest.raises(InputError, match="the row decodes"):
        admission.advance()
    finish(engine)
    assert row.generated == expected(SHORT)[0]


def test_a_chunk_of_nothing_is_refused():
    engine = make_engine(make_target("llama"), None, slots=1)
    with pytest.raises(InputError, match="chunk is 0"):
        engine.begin(make_rows(engine.slots, [SHORT], PARAMS)[0], PARAMS, chunk=0)
    assert engine.free == 1


def test_an_engine_that_only_reads_is_not_idle():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1)
    (row,) = make_rows(engine.slots, [LONG], PARAMS)
    admission = engine.begin(row, PARAMS, chunk=10)
    admission.advance()
    assert engine.advance().commits == []
    with pytest.raises(InputError, match="1 rows are running"):
        engine.resize(slots=2, capacity=64)
    with pytest.raises(InputError, match="1 rows are running"):
        engine.speculates = False


@pytest.mark.parametrize("reuse", [False, True])
def test_a_row_released_while_it_is_read_frees_its_slot(reuse):
    engine = make_engine(make_target("llama"), random_drafter(), slots=2, reuse=reuse)
    gone, other, late = make_rows(engine.slots, [LONG, SHORT, OTHER], PARAMS)
    engine.admit(other, PARAMS)
    admission = engine.begin(gone, PARAMS, chunk=10)
    admission.advance()
    engine.advance()
    engine.release(gone)
    assert engine.free == 1
    assert gone.generated == []
    with pytest.raises(InputError, match="has left its slot"):
        admission.advance()
    engine.admit(late, PARAMS)
    finish(engine)
    assert [other.generated, late.generated] == expected(SHORT, OTHER)


def test_a_failure_while_reading_frees_the_slot(monkeypatch):
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, reuse=True)
    row, again = make_rows(engine.slots, [LONG, LONG], PARAMS)
    admission = engine.begin(row, PARAMS, chunk=20)
    admission.advance()

    def broken(*_args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.drafter, "observe", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            admission.advance()
    assert engine.free == 1
    # The chunk that failed counts for nothing: its tokens are not in the drafter's context.
    assert engine.begin(again, PARAMS).reused == 20


# One row's failure --------------------------------------------------------------------------------


def failing_at(count):
    def rule(row):
        if len(row.generated) == count:
            raise RuntimeError(f"a stop rule of row {row.index}")

    return rule


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_fails_is_listed_and_all_others_keep_their_commits(ahead):
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=3, ahead=ahead)
    rows = make_rows(engine.slots, [SHORT, LONG, OTHER], PARAMS)
    rows[1].stop_rules = [failing_at(4)]
    heard = {row.index: [] for row in rows}
    for row in rows:
        heard[row.index] += engine.admit(row, PARAMS).tokens
    failures = []
    while engine.busy:
        turn = engine.advance()
        for commit in turn.commits:
            heard[commit.row] += commit.tokens
        failures += turn.failures
        if turn.failures:
            assert {commit.row for commit in turn.commits} == {0, 2}
            assert engine.free == 1
    ((row, error),) = failures
    assert row is rows[1]
    assert str(error) == "a stop rule of row 1"
    texts = expected(SHORT, LONG, OTHER)
    assert [heard[0], heard[2]] == [texts[0], texts[2]]
    assert rows[1].generated == texts[1][:4]


def test_a_row_that_fails_at_its_first_token_leaves():
    engine = make_engine(make_target("llama"), None, slots=1)
    (row,) = make_rows(engine.slots, [SHORT], PARAMS)
    row.stop_rules = [failing_at(1)]
    with pytest.raises(RuntimeError, match="row 0"):
        engine.admit(row, PARAMS)
    assert (engine.free, engine.busy) == (1, False)


def test_a_step_raises_what_a_turn_lists():
    engine = make_engine(make_target("llama"), None, slots=2)
    rows = make_rows(engine.slots, [SHORT, OTHER], PARAMS)
    rows[0].stop_rules = [failing_at(2)]
    for row in rows:
        engine.admit(row, PARAMS)
    with pytest.raises(RuntimeError, match="row 0"):
        engine.step()
    finish(engine)
    assert rows[1].generated == expected(SHORT, OTHER)[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_that_failed_starts_again_empty(ahead, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    engine = make_engine(make_target("llama"), random_drafter(), slots=2, ahead=ahead, reuse=True)
    (lost,) = make_rows(engine.slots, [SHORT], PARAMS)
    engine.admit(lost, PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.cycle, "run", broken)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.restart()
    assert (engine.running, engine.free, engine.busy) == (0, 2, False)
    found, _, _ = run_engine(engine, [SHORT, LONG], max_new_tokens=20)
    assert found == expected(SHORT, LONG)


def test_a_row_takes_nothing_of_the_device_that_it_does_not_need():
    """Rows are made in other threads, many at a time; only processors and criteria look at ids."""
    engine = make_engine(make_target("llama"), None, slots=1)
    (row,) = make_rows(engine.slots, [SHORT], PARAMS)
    engine.admit(row, PARAMS)
    finish(engine)
    assert row._ids is None
    assert row.ids.tolist() == [SHORT + row.generated]
