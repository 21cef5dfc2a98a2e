"""Pages of the caches: who gets them, who shares them, and that nobody waits for ever."""

import random
from collections import Counter

import pytest
import torch

from domino_spec.decoding import SamplingParams
from domino_spec.engine.block_manager import PageManager
from domino_spec.engine.cache import PageTable
from domino_spec.errors import InputError
from tests.engine.runs import finish, make_engine, make_requests, run_reference
from tests.support.families import make_target, random_drafter, random_prompts

PAGE, MARGIN = 4, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEXT = list(range(100, 140))


def manager(pages, *, slots=4, capacity=60, reuse=True, **options):
    """So many pages that can be given out."""
    table = PageTable(
        slots=slots + 1, capacity=capacity, pages=pages + 1, page=PAGE, device=torch.device("cpu")
    )
    return PageManager(slots, table, margin=MARGIN, reuse=reuse, **options)


def sequence(prompt, new=8, **options):
    (found,) = make_requests([prompt], max_new_tokens=new)
    for name, value in options.items():
        setattr(found, name, value)
    return found


def admit(blocks, new, running=(), *, drafts=True):
    """Whether it got a slot; if so its prompt is computed and its first token chosen."""
    if blocks.allocate(new, running, drafts=drafts) is None:
        return False
    new.computed = len(new.prompt)
    new.output.append(7)
    return True


def held(blocks, each):
    """A sequence's pages, as the device is told."""
    blocks.table.send()
    row = blocks.table.table[each.slot].tolist()
    assert row == blocks.table._host[each.slot].tolist()
    count = next((i for i, page in enumerate(row) if not page), len(row))
    assert not any(row[count:])
    return row[:count]


def test_a_sequence_gets_pages_as_it_grows():
    blocks, own = manager(20), sequence(TEXT[:10], new=9)
    assert admit(blocks, own)
    assert len(held(blocks, own)) == 4  # for 10 tokens and 3 places after them
    counts = []
    for _ in range(8):
        assert blocks.extend([own]) == [own]
        counts.append(len(held(blocks, own)))
        own.output.append(7)
    assert counts == [4, 4, 4, 5, 5, 5, 5, 6]
    assert 0 not in held(blocks, own), "page 0 is nobody's"
    assert blocks.usage == 6 / 20
    blocks.release(own, drafts=True)
    assert blocks._spare == 20
    assert blocks.usage == 0


def test_whole_pages_of_a_common_beginning_are_shared():
    blocks, first = manager(30), sequence(TEXT[:14])
    assert admit(blocks, first)
    second = sequence([*TEXT[:11], 1, 2, 3])
    assert admit(blocks, second, [first])
    assert second.cached == 8
    assert held(blocks, second)[:2] == held(blocks, first)[:2]
    assert not set(held(blocks, second)[2:]) & set(held(blocks, first))
    before = held(blocks, first)
    blocks.release(first, drafts=True)
    third = sequence([*TEXT[:14], 7])  # its own pages are known, the shared ones still there
    assert admit(blocks, third, [second])
    assert third.cached == 12
    assert held(blocks, third)[:3] == before[:3]
    whole = sequence(TEXT[:12])  # the last token is always computed
    assert admit(blocks, whole, [second, third])
    assert whole.cached == 8


def test_pages_of_an_answer_are_found_by_the_next_turn():
    blocks, first = manager(30), sequence(TEXT[:6], new=20)
    assert admit(blocks, first)
    for token in (8, 9, 10, 11):  # the last one's states are not in the caches
        first.output.append(token)
        assert blocks.extend([first])
    blocks.release(first, drafts=True)
    again = sequence(TEXT[:6] + first.output + [1, 2])
    assert admit(blocks, again)
    assert again.cached == 8


@pytest.mark.parametrize(("reads_next", "cached"), [(False, 8), (True, 4)])
def test_a_page_whose_last_token_was_followed_by_another_is_not_shared(reads_next, cached):
    blocks, first = manager(30, reads_next=reads_next), sequence(TEXT[:14])
    assert admit(blocks, first)
    second = sequence([*TEXT[:8], 1, 2, 3])
    assert admit(blocks, second, [first])
    assert second.cached == cached


def test_a_sequence_with_drafts_takes_no_pages_without_them():
    blocks, plain = manager(30), sequence(TEXT[:14], speculate=False)
    assert admit(blocks, plain, drafts=False)
    drafting = sequence(TEXT[:14])
    assert admit(blocks, drafting, [plain])
    assert drafting.cached == 0
    other = sequence(TEXT[:14], speculate=False)
    assert admit(blocks, other, [plain, drafting], drafts=False)
    assert other.cached == 12
    last = sequence(TEXT[:14])
    assert admit(blocks, last, [plain, drafting, other])
    assert last.cached == 12
    assert held(blocks, last)[:3] == held(blocks, drafting)[:3]


def test_one_that_begins_as_a_prefill_under_way_waits_for_it():
    blocks, first = manager(40), sequence(TEXT[:14])
    assert blocks.allocate(first, [], drafts=True) is not None
    assert not admit(blocks, sequence([*TEXT[:12], 1]), [first])
    assert admit(blocks, sequence([5, *TEXT[:12]]), [first])
    first.computed, waits = 14, sequence([*TEXT[:12], 1])
    assert admit(blocks, waits, [first])
    assert waits.cached == 12


def test_pages_freed_first_are_taken_first_and_then_not_found():
    blocks = manager(12, slots=2)
    for text in (TEXT[:9], TEXT[20:29]):
        own = sequence(text, new=1)
        assert admit(blocks, own)
        blocks.release(own, drafts=True)
    taker = sequence(range(1, 38), new=1)  # all but two
    assert admit(blocks, taker)
    blocks.release(taker, drafts=True)
    first, second = sequence(TEXT[:9], new=1), sequence(TEXT[20:29], new=1)
    assert admit(blocks, second)
    assert second.cached == 8
    assert admit(blocks, first, [second])
    assert first.cached == 0


def test_forgotten_pages_are_not_found_and_free_slots_may_be_written():
    blocks, own = manager(12, slots=2, capacity=24), sequence(TEXT[:9], new=1)
    assert admit(blocks, own)
    blocks.release(own, drafts=True)
    blocks.forget()
    rows = blocks.table.table[:2].flatten().tolist()
    assert sorted(rows) == list(range(1, 13)), "of their own as far as there are any"
    assert not any(blocks.table.table[2].tolist()), "what fills up a batch writes to nobody's"
    again = sequence(TEXT[:9], new=1)
    assert admit(blocks, again)
    assert again.cached == 0
    assert len(held(blocks, again)) == 3


@pytest.mark.parametrize("seed", range(6))
def test_all_come_to_their_end_however_few_pages_there_are(seed):
    """Arrivals, growth and aborts by chance; no page has two writers and none is lost."""
    rng = random.Random(seed)
    pages = 16
    blocks, running, waiting = manager(pages, slots=5), [], []
    ended = sat_out = shared = 0
    for turn in range(3000):
        if turn < 2500 and len(waiting) < 3:
            prompt = TEXT[: rng.randint(0, 12)] + [
                rng.randint(0, 9) for _ in range(rng.randint(1, 9))
            ]
            waiting.append(sequence(prompt, new=rng.randint(1, 61 - len(prompt) - MARGIN)))
        while waiting and admit(blocks, waiting[0], running):
            shared += waiting[0].cached > 0
            running.append(waiting.pop(0))
        goes = blocks.extend(running)
        sat_out += len(running) - len(goes)
        assert goes or not running, "nobody can go on"
        users = Counter(page for each in running for page in held(blocks, each))
        assert set(users) <= set(range(1, pages + 1))
        for each in running:
            own = held(blocks, each)
            length = len(each.prompt) + len(each.output)
            if each in goes:  # wherever it may write it is alone
                assert len(own) * PAGE >= length + MARGIN
                assert all(users[page] == 1 for page in own[(length - 1) // PAGE :])
        free = [*blocks._empty, *blocks._idle]
        assert sorted([*free, *users]) == list(range(1, pages + 1))
        for each in goes:
            for _ in range(rng.randint(1, 2)):
                if len(each.output) < each.params.max_new_tokens:
                    each.output.append(rng.randint(0, 9))
            if len(each.output) >= each.params.max_new_tokens or rng.random() < 0.01:
                blocks.release(each, drafts=True)
                running.remove(each)
                ended += 1
        if not (running or waiting):
            break
    assert not running
    assert not waiting
    assert (ended > 50, sat_out > 10, shared > 10) == (True, True, True)


def test_sequences_that_sit_out_get_their_text_all_the_same(monkeypatch):
    """Together they want twice the pages that there are; on a GPU, where there is one."""
    target, prompts = make_target("llama"), random_prompts([30, 25, 33, 28])
    new, page, tokens = (150, 64, 320) if DEVICE.type == "cuda" else (60, 16, 200)
    params = SamplingParams(max_new_tokens=new)
    expected = run_reference(target, None, prompts, max_new_tokens=new)[0]
    drafter = random_drafter()
    engine = make_engine(
        target, drafter, slots=4, capacity=40 + new, page=page, tokens=tokens, ahead=True,
        device=DEVICE,
    )  # fmt: skip
    blocks, sat_out = engine.scheduler.blocks, []
    extend = blocks.extend
    monkeypatch.setattr(
        blocks, "extend", lambda own: sat_out.append(set(own) - set(extend(own))) or extend(own)
    )
    sequences = make_requests(prompts, params=[params] * 4)
    for each in sequences:
        engine.add_request(each)
    finish(engine)
    assert [each.output for each in sequences] == expected
    assert any(sat_out)


def test_memory_follows_the_tokens_that_are_asked_for():
    target, drafter = make_target("llama"), random_drafter()
    sizes = {"slots": 8, "capacity": 256, "page": 64, "device": DEVICE}
    whole = make_engine(target, drafter, **sizes)
    small = make_engine(target, drafter, **sizes, tokens=512)
    assert 0.2 < small.cache_bytes / whole.cache_bytes < 0.3
    prompts = random_prompts([40] * 8)
    expected = run_reference(target, None, prompts, max_new_tokens=10)[0]
    for engine in (whole, small):
        sequences = make_requests(prompts, max_new_tokens=10)
        for each in sequences:
            engine.add_request(each)
        finish(engine)
        assert [each.output for each in sequences] == expected
    with pytest.raises(InputError, match=r"hold 100 tokens, and one slot 256; expected .* fewer"):
        make_engine(target, drafter, **sizes, tokens=100)
