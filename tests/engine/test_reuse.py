"""What lies in the slots is used again, and nobody can tell by text or drafts."""

import pytest

from domino_spec.decoding import SamplingParams
from domino_spec.engine.calibration import adapt_depth
from domino_spec.engine.seating import Seating, common
from tests.engine.runs import make_engine, run_reference, watch
from tests.support.families import make_target, random_drafter, random_prompts
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.runs import make_rows

SYSTEM, ASK, OTHER, FAR = random_prompts([30, 6, 7, 12])
GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95)


def new_row(engine, prompt, params=GREEDY):
    return make_rows(engine.slots, [prompt], params)[0]


def answer(engine, prompt, params=GREEDY, *, cycles=None):
    """A row decoded to its end, or for some cycles, and how much of its prompt was there."""
    row = new_row(engine, prompt, params)
    admission = engine.begin(row, params, seed=5)
    assert admission.remaining == len(prompt) - admission.reused
    while admission.advance() is None:
        pass
    while row.finish_reason is None and cycles != 0:
        engine.step()
        cycles = None if cycles is None else cycles - 1
    return row, admission.reused


def fresh(target, drafter, prompt, params=GREEDY):
    """The same by an engine that has seen nothing else: text, drafts and counts."""
    engine = make_engine(target, drafter, slots=1)
    blocks = watch(engine)
    row, _ = answer(engine, prompt, params)
    return row.generated, blocks, row.stats


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_text_and_drafts_behind_a_prefix_are_those_of_a_fresh_engine(family, params):
    target, drafter = make_target(family), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True)
    answer(engine, SYSTEM + ASK, params)
    for prompt, shared in ((SYSTEM + OTHER, 30), (SYSTEM[:17] + FAR, 17), (FAR, 0)):
        blocks = watch(engine)
        row, reused = answer(engine, prompt, params)
        assert reused == shared
        assert (row.generated, blocks, row.stats) == fresh(target, drafter, prompt, params)


def test_greedy_text_is_the_reference_loops():
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=2, reuse=True)
    prompts = [SYSTEM + ASK, SYSTEM + OTHER, SYSTEM, SYSTEM + OTHER + ASK]
    found = [answer(engine, prompt)[0].generated for prompt in prompts]
    expected = run_reference(target, None, prompts, depth=0, candidates=None, max_new_tokens=20)[0]
    assert found == expected


@pytest.mark.parametrize("drafts", [True, False])
def test_the_next_turn_of_a_chat_reads_what_is_new_alone(drafts):
    """The last token of an answer was an anchor: its states are not in the caches."""
    target, drafter = make_target("llama"), random_drafter() if drafts else None
    engine = make_engine(target, drafter, slots=2, reuse=True)
    text, known = SYSTEM + ASK, 0
    for new in (OTHER, FAR, ASK):
        row, reused = answer(engine, text)
        assert reused == known
        assert row.generated == fresh(target, drafter, text)[0]
        known = len(text) + len(row.generated) - 1
        text = text + row.generated + new


def test_the_whole_prompt_but_its_last_token_is_the_most_there_is():
    engine = make_engine(make_target("llama"), random_drafter(), slots=1, reuse=True)
    first, _ = answer(engine, SYSTEM)
    again, reused = answer(engine, SYSTEM)
    assert reused == len(SYSTEM) - 1
    assert again.generated == first.generated


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_running_rows_tokens_are_copied(params, ahead):
    """Prompt and committed answer alike, while its cycles go on."""
    target, drafter = make_target("qwen3"), random_drafter()
    engine = make_engine(target, drafter, slots=3, reuse=True, ahead=ahead)
    running, _ = answer(engine, SYSTEM, params, cycles=4)
    assert running.finish_reason is None
    assert len(running.generated) >= 4
    text = SYSTEM + running.generated
    prompts = [SYSTEM[:20] + ASK, text + OTHER]
    rows = []
    for prompt, shared in zip(prompts, (20, len(text) - 1), strict=True):
        row = new_row(engine, prompt, params)
        admission = engine.begin(row, params, seed=5)
        assert admission.reused == shared
        while admission.advance() is None:
            pass
        rows.append(row)
    while engine.busy:
        engine.step()
    for row in (running, *rows):
        generated, _, stats = fresh(target, drafter, row.prompt, params)
        assert (row.generated, row.stats) == (generated, stats)


def test_what_lies_behind_a_running_rows_tokens_is_never_known():
    """Its drafts were written there too, right or wrong; only committed tokens count."""
    target = make_target("llama")
    engine = make_engine(target, random_drafter(), slots=2, reuse=True, ahead=True)
    running, _ = answer(engine, SYSTEM, cycles=3)
    whole = fresh(target, None, SYSTEM)[0]
    done = len(running.generated)
    assert done < len(whole) - 2
    row = new_row(engine, SYSTEM + whole[: done + 2])
    assert engine.begin(row, GREEDY).reused == len(SYSTEM) + done - 1


def test_drafts_are_accepted_as_before():
    engine = make_engine(
        bigram_target(), knowing_drafter(shift=True, prefix=1), slots=2, reuse=True
    )
    first, _ = answer(engine, [1, 2, 3, 4])
    second, reused = answer(engine, [1, 2, 3, 4, *first.generated, 9, 9])
    assert reused == 4 + len(first.generated) - 1
    assert all(share == 1.0 for share in second.stats.acceptance_by_position)
    assert second.stats.tokens_per_cycle == first.stats.tokens_per_cycle > 4


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_released_in_mid_flight_leaves_what_it_committed(ahead):
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True, ahead=ahead)
    gone, _ = answer(engine, SYSTEM, cycles=4)
    engine.release(gone)
    text = SYSTEM + gone.generated
    blocks = watch(engine)
    row, reused = answer(engine, text + OTHER)
    assert reused == len(text) - 1
    generated, drafts, _ = fresh(target, drafter, text + OTHER)
    assert row.generated == generated
    assert drafts <= blocks  # a cycle started ahead may draft once more


def test_a_row_released_while_it_was_read_leaves_what_it_read():
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=1, reuse=True)
    row = new_row(engine, SYSTEM + ASK)
    admission = engine.begin(row, GREEDY, chunk=8)
    for _ in range(3):
        assert admission.advance() is None
    engine.release(row)
    row, reused = answer(engine, SYSTEM + ASK)
    assert reused == 24
    assert row.generated == fresh(target, drafter, SYSTEM + ASK)[0]


# What is forgotten --------------------------------------------------------------------------------


def forget_by(engine, how):
    if how == "resize":
        engine.resize(slots=2, capacity=128)
    elif how == "alone":
        engine.speculates = False
    elif how == "twin":
        return engine.twin(slots=2, capacity=128)
    elif how == "measured":
        adapt_depth(engine, batches=[1])
        engine.policy = None
    return engine


@pytest.mark.parametrize("how", ["resize", "alone", "twin", "measured"])
def test_what_is_no_longer_there_is_not_used(how, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=2, reuse=True)
    answer(engine, SYSTEM + ASK)
    engine = forget_by(engine, how)
    row, reused = answer(engine, SYSTEM + OTHER)
    assert reused == 0
    assert row.generated == fresh(target, drafter, SYSTEM + OTHER)[0]
    assert answer(engine, SYSTEM + ASK)[1] == 30


def test_a_drafter_that_was_told_nothing_reuses_nothing():
    target, drafter = make_target("llama"), random_drafter()
    engine = make_engine(target, drafter, slots=2, reuse=True)
    engine.speculates = False
    answer(engine, SYSTEM + ASK)
    engine.speculates = False
    assert answer(engine, SYSTEM + ASK)[1] == 35  # no change, nothing forgotten
    engine.speculates = True
    blocks = watch(engine)
    row, reused = answer(engine, SYSTEM + OTHER)
    assert reused == 0
    assert (row.generated, blocks, row.stats) == fresh(target, drafter, SYSTEM + OTHER)


def test_without_reuse_nothing_is_remembered():
    engine = make_engine(make_target("llama"), None, slots=2)
    answer(engine, SYSTEM)
    assert answer(engine, SYSTEM)[1] == 0


# Which slot ---------------------------------------------------------------------------------------


def seat(seating, prompt, answer=()):
    row = make_rows(_Device, [prompt], SamplingParams(max_new_tokens=99))[0]
    taken = seating.take(row, GREEDY, None)
    taken.read = len(prompt)
    row.take(answer or [0])
    return taken


class _Device:
    device = None


def test_a_free_slot_that_holds_the_prefix_is_taken_over():
    seating = Seating(3, reuse=True)
    first = seat(seating, SYSTEM, [1, 2, 3])
    seating.leave(first.row)
    second = seat(seating, [*SYSTEM, 1, 2, 7])
    assert (second.slot, second.source, second.reused) == (first.slot, first.slot, 32)
    third = seat(seating, [*SYSTEM, 1, 2, 7, 8])
    assert third.slot != second.slot
    assert (third.source, third.reused) == (second.slot, 33)


def test_a_slot_of_which_little_is_shared_keeps_what_it_holds():
    seating = Seating(2, reuse=True)
    first = seat(seating, SYSTEM)
    seating.leave(first.row)
    second = seat(seating, SYSTEM[:14] + ASK)  # less than half of what lies there
    assert second.slot != first.slot
    assert (second.source, second.reused) == (first.slot, 14)
    seating.leave(second.row)
    third = seat(seating, SYSTEM + OTHER)
    assert (third.slot, third.reused) == (first.slot, 30)


def test_a_slot_of_which_half_is_shared_is_taken_over():
    seating = Seating(2, reuse=True)
    first = seat(seating, SYSTEM)
    seating.leave(first.row)
    second = seat(seating, SYSTEM[:15] + ASK)
    assert (second.slot, second.source, second.reused) == (first.slot, first.slot, 15)


def test_the_slot_that_was_left_first_is_given_up():
    seating = Seating(3, reuse=True)
    seats = [seat(seating, prompt) for prompt in (SYSTEM, OTHER, FAR)]
    for each in (seats[1], seats[2], seats[0]):
        seating.leave(each.row)
    taken = seat(seating, [0, *ASK])
    assert (taken.slot, taken.reused) == (seats[1].slot, 0)
    again = seat(seating, [*FAR, 1])  # what others hold is still known
    assert (again.slot, again.reused) == (seats[2].slot, 12)


def test_an_empty_slot_is_taken_before_one_that_holds_something():
    seating = Seating(2, reuse=True)
    first = seat(seating, SYSTEM)
    empty = seating.take(make_rows(_Device, [OTHER], GREEDY)[0], GREEDY, None)
    seating.leave(first.row)
    seating.leave(empty.row)  # it has read nothing
    assert seat(seating, FAR).slot == empty.slot


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 700])
def test_how_much_two_texts_share(length):
    left = list(range(length)) + [-1] * 300
    right = list(range(length)) + [-2] * 10
    assert common(left, right) == common(right, left) == length
    assert common(left, left[:length]) == length
