"""Who gets a slot, whose prompt is computed, and what of it the caches hold already."""

import pytest

from domino_spec.decoding import SamplingParams, Status
from domino_spec.engine.block_manager import BlockManager, common, pack
from domino_spec.engine.scheduler import Scheduler
from tests.support.families import random_prompts
from tests.support.runs import make_sequences

SYSTEM, ASK, OTHER, FAR = random_prompts([30, 6, 7, 12])
PARAMS = SamplingParams(max_new_tokens=10)


def make_sequence(prompt, **options):
    return make_sequences([prompt], PARAMS, **options)[0]


def make_scheduler(slots=2, *, reuse=False):
    return Scheduler(BlockManager(slots, reuse=reuse), drafts=lambda sequence: sequence.speculate)


def compute(schedule):
    """As the engine does once the chunks were launched."""
    for chunk in schedule.prefill:
        chunk.sequence.computed += chunk.count
        if chunk.last:
            chunk.sequence.output.append(0)


# Scheduler ----------------------------------------------------------------------------------------


def test_slots_go_to_those_who_came_first():
    scheduler = make_scheduler()
    sequences = [make_sequence(prompt) for prompt in (ASK, OTHER, FAR)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [sequence for sequence, _ in scheduler.admit(100)] == sequences[:2]
    assert [sequence.status for sequence in sequences] == [
        Status.PREFILL, Status.PREFILL, Status.WAITING
    ]  # fmt: skip
    assert scheduler.admit(100) == []
    scheduler.remove(sequences[0])
    assert [sequence for sequence, _ in scheduler.admit(100)] == [sequences[2]]


def test_a_client_with_many_requests_does_not_keep_another_waiting():
    scheduler = make_scheduler(1)
    busy = [make_sequence(ASK, client="busy") for _ in range(3)]
    late = make_sequence(ASK, client="late")
    for sequence in (*busy, late):
        scheduler.add(sequence)
    order = []
    for _ in range(4):
        ((sequence, _),) = scheduler.admit(100)
        order.append(sequence)
        scheduler.remove(sequence)
    assert order == [busy[0], late, busy[1], busy[2]]


def test_one_that_does_not_fit_waits_and_is_not_overtaken():
    scheduler = make_scheduler()
    long, short = make_sequence([5] * 50), make_sequence(ASK)
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.admit(59) == []
    assert [sequence for sequence, _ in scheduler.admit(60)] == [long, short]


def test_prompts_are_computed_in_chunks_concurrently_with_decoding():
    scheduler = make_scheduler(3)
    first = make_sequence(ASK)
    scheduler.add(first)
    scheduler.admit(100)
    compute(scheduler.schedule(budget=8, alone=100, pairs=10_000))
    second, third = make_sequence(SYSTEM), make_sequence(OTHER)
    scheduler.add(second)
    scheduler.add(third)
    scheduler.admit(100)
    chunks = []
    while any(sequence.status is Status.PREFILL for sequence in scheduler.running):
        schedule = scheduler.schedule(budget=8, alone=100, pairs=10_000)
        assert schedule.decode[0] is first
        assert sum(chunk.count for chunk in schedule.prefill) <= 8
        chunks += [(chunk.sequence, chunk.start, chunk.count) for chunk in schedule.prefill]
        compute(schedule)
    assert chunks == [
        (second, 0, 8), (second, 8, 8), (second, 16, 8), (second, 24, 6), (third, 0, 2),
        (third, 2, 5),
    ]  # fmt: skip
    assert schedule.decode == [first, third] or schedule.decode == [first, second, third]


def test_where_nothing_decodes_several_prompts_are_computed_at_once():
    scheduler = make_scheduler(4)
    sequences = [make_sequence(prompt) for prompt in (SYSTEM, ASK, OTHER, FAR)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit(100)
    schedule = scheduler.schedule(budget=4, alone=50, pairs=10_000)
    assert [(chunk.sequence, chunk.count) for chunk in schedule.prefill] == list(
        zip(sequences, (30, 6, 7, 7), strict=True)
    )
    assert schedule.decode == sequences[:3]  # they go on to decode in the same step


def test_chunks_are_shorter_the_more_their_tokens_see():
    """Attention's mask has a number for each pair of a prompt's token and one that it may see."""
    scheduler = make_scheduler(2)
    sequences = [make_sequence(SYSTEM), make_sequence(OTHER)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit(100)
    chunks = []
    while any(sequence.status is Status.PREFILL for sequence in scheduler.running):
        schedule = scheduler.schedule(budget=4, alone=50, pairs=150)
        counts, ends = zip(*[(c.count, c.start + c.count) for c in schedule.prefill], strict=True)
        assert sum(counts) * max(ends) <= 150
        chunks += [(c.sequence, c.count) for c in schedule.prefill]
        compute(schedule)
    assert chunks == [(sequences[0], n) for n in (12, 7, 6, 5)] + [(sequences[1], 4)] + [
        (sequences[1], 3)
    ]
    long = make_sequence(SYSTEM * 4)
    scheduler = make_scheduler(1)
    scheduler.add(long)
    scheduler.admit(200)
    long.computed = 110
    assert [c.count for c in scheduler.schedule(budget=4, alone=50, pairs=99).prefill] == [1]


def test_removing_frees_the_slot_wherever_the_sequence_is():
    scheduler = make_scheduler(1)
    running, waiting = make_sequence(ASK), make_sequence(OTHER)
    for sequence in (running, waiting):
        scheduler.add(sequence)
    scheduler.admit(100)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert (len(scheduler.waiting), scheduler.running) == (0, [])
    assert scheduler.blocks.free == [0]


# Block manager ------------------------------------------------------------------------------------


def place(blocks, prompt, answer=(0,), *, running=(), drafts=True):
    """A sequence that has been computed and has answered."""
    sequence = make_sequence(prompt, speculate=drafts)
    found = blocks.allocate(sequence, running, drafts=drafts)
    sequence.computed = len(prompt)
    sequence.output = list(answer)
    return sequence, found


def leave(blocks, sequence):
    blocks.release(sequence, drafts=sequence.speculate)


def test_every_slot_is_given_once():
    blocks = BlockManager(3, reuse=False)
    sequences = [make_sequence(ASK) for _ in range(4)]
    found = [blocks.allocate(sequence, (), drafts=True) for sequence in sequences]
    assert {each.slot for each in found[:3]} == {0, 1, 2}
    assert found[3] is None
    leave(blocks, sequences[1])
    assert blocks.allocate(sequences[3], (), drafts=True).slot == found[1].slot


def test_a_free_slot_that_holds_the_prefix_is_taken_over():
    blocks = BlockManager(3, reuse=True)
    first, allocated = place(blocks, SYSTEM, [1, 2, 3])
    leave(blocks, first)
    second, found = place(blocks, [*SYSTEM, 1, 2, 7])
    assert (found.slot, found.source, found.reused) == (allocated.slot, allocated.slot, 32)
    _, third = place(blocks, [*SYSTEM, 1, 2, 7, 8], running=[second])
    assert third.slot != found.slot
    assert (third.source, third.reused) == (found.slot, 33)


@pytest.mark.parametrize(("shared", "taken"), [(14, False), (15, True)])
def test_a_slot_is_taken_over_where_half_of_it_is_shared(shared, taken):
    blocks = BlockManager(2, reuse=True)
    first, allocated = place(blocks, SYSTEM)
    leave(blocks, first)
    _, found = place(blocks, SYSTEM[:shared] + ASK)
    assert (found.source, found.reused) == (allocated.slot, shared)
    assert (found.slot == allocated.slot) is taken


def test_the_slot_that_was_left_first_is_given_up():
    blocks = BlockManager(3, reuse=True)
    placed = [place(blocks, prompt) for prompt in (SYSTEM, OTHER, FAR)]
    for index in (1, 2, 0):
        leave(blocks, placed[index][0])
    _, found = place(blocks, [0, *ASK])
    assert (found.slot, found.reused) == (placed[1][1].slot, 0)
    _, again = place(blocks, [*FAR, 1])  # what others hold is still known
    assert (again.slot, again.reused) == (placed[2][1].slot, 12)


def test_an_empty_slot_is_taken_before_one_that_holds_something():
    blocks = BlockManager(2, reuse=True)
    first, _ = place(blocks, SYSTEM)
    empty = make_sequence(OTHER)
    slot = blocks.allocate(empty, (), drafts=True).slot
    leave(blocks, first)
    leave(blocks, empty)  # nothing of it was computed
    assert place(blocks, FAR)[1].slot == slot


def test_what_the_drafter_has_not_seen_is_of_no_use_to_one_with_drafts():
    blocks = BlockManager(2, reuse=True)
    plain, _ = place(blocks, SYSTEM, drafts=False)
    assert place(blocks, SYSTEM + ASK, running=[plain])[1].reused == 0
    blocks = BlockManager(2, reuse=True)
    leave(blocks, place(blocks, SYSTEM, drafts=False)[0])
    sequence, found = place(blocks, SYSTEM + ASK)
    assert found.reused == 0
    leave(blocks, sequence)
    assert place(blocks, SYSTEM + OTHER, drafts=False)[1].reused == 30


def test_one_waits_for_a_long_beginning_that_another_is_about_to_compute():
    (shared,) = random_prompts([80])
    blocks = BlockManager(2, reuse=True)
    first, second = make_sequence(shared + ASK), make_sequence(shared + OTHER)
    blocks.allocate(first, (), drafts=True)
    assert blocks.allocate(second, [first], drafts=True) is None
    assert blocks.allocate(make_sequence(FAR), [first], drafts=True) is not None
    leave(blocks, first)
    first, third = make_sequence(shared + ASK), make_sequence(shared + OTHER, reuse=False)
    blocks = BlockManager(2, reuse=True)
    blocks.allocate(first, (), drafts=True)
    assert blocks.allocate(third, [first], drafts=True).reused == 0
    blocks = BlockManager(2, reuse=True)
    blocks.allocate(first, (), drafts=True)
    first.computed = len(first.prompt)
    assert blocks.allocate(second, [first], drafts=True).reused == 80


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_equally_good_slots_the_one_that_loses_less_is_taken_over(order):
    """All of the prompt lies in both; one of them holds much more."""
    blocks = BlockManager(3, reuse=True)
    placed = [place(blocks, SYSTEM), place(blocks, SYSTEM + random_prompts([90])[0])]
    for index in order:
        leave(blocks, placed[index][0])
    for prompt in (SYSTEM, [*SYSTEM[:-2], 1]):
        asked, found = place(blocks, prompt)
        assert (found.slot, found.reused) == (placed[0][1].slot, len(prompt) - 1)
        leave(blocks, asked)
        leave(blocks, place(blocks, SYSTEM)[0])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 257, 700, 5000])
def test_how_much_two_texts_share(length):
    left = pack([*range(length), *[9] * 300])
    right, prefix = pack([*range(length), *[8] * 10]), pack(range(length))
    assert common(left, right) == common(right, left) == length
    assert common(left, prefix) == common(left, right, length // 2) == length


def test_the_longest_beginning_is_found_among_many():
    """Also one that a running sequence is generating."""
    texts = random_prompts([60] * 40)
    blocks = BlockManager(41, reuse=True)
    placed = [place(blocks, SYSTEM + text) for text in texts]
    for sequence, _ in placed[::2]:
        leave(blocks, sequence)
    running = [sequence for sequence, _ in placed[1::2]]
    for index, count in ((6, 40), (7, 11)):
        asked = make_sequence(SYSTEM + texts[index][:count] + ASK)
        found = blocks.allocate(asked, running, drafts=True)
        assert (found.source, found.reused) == (placed[index][1].slot, len(SYSTEM) + count)
        leave(blocks, asked)
    running[0].output = [1, 2, 3, 4]
    same = [make_sequence(running[0].prompt) for _ in range(2)]  # holds less, and is no better
    for sequence in same:
        blocks.allocate(sequence, running, drafts=True)
        sequence.computed = len(sequence.prompt)
    leave(blocks, same[0])
    asked = make_sequence([*running[0].prompt, 1, 2, 3, 4])
    found = blocks.allocate(asked, [*running, same[1]], drafts=True)
    assert (found.source, found.reused) == (running[0].slot, len(running[0].prompt) + 3)
