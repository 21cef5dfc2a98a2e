"""Prompt lookup: the longest match, the latest one, as far as the text goes."""

import pytest
import torch

from domino_spec.drafters import LookupDrafter
from domino_spec.errors import InputError
from tests.support.families import plain_greedy
from tests.support.pair import bigram_target
from tests.support.runs import run


def drafts(prompt, generated, *, depth=4, **options):
    *known, anchor = [*prompt, *generated]
    drafter = LookupDrafter(depth=depth, **options).bind(bigram_target())
    drafter.resize(slots=1, capacity=len(known) + depth + 1)
    slots = torch.tensor([0])
    start = torch.tensor([len(known)])
    drafter.update_cache(torch.empty(0), torch.tensor([known]), slots=slots, starts=slots)
    place = {"slots": slots, "starts": start, "depth": depth, "sampler": None}
    return drafter.propose(torch.tensor([anchor]), **place)[0].tolist()


@pytest.mark.parametrize(
    ("prompt", "generated", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3], [4, 5, 6, 7]),  # three tokens
        ([1, 2, 3, 4, 9, 2, 3, 8], [7, 2, 3], [8, 7, 2, 3]),  # two tokens: the latest
        ([1, 2, 3, 4, 9, 2, 3, 8], [1, 2, 3], [4, 9, 2, 3]),  # three beat the latest two
        ([5, 6, 7], [5], [6, 7, 5]),  # one token; the text ends before the depth
        ([1, 2, 3], [4], []),  # never seen
        ([4], [4], [4]),  # an overlap of the text with itself
    ],
)
def test_what_is_found(prompt, generated, expected):
    assert drafts(prompt, generated) == expected


def test_the_longest_match_is_a_setting():
    prompt = [1, 2, 3, 4, 9, 2, 3, 8]
    assert drafts(prompt, [1, 2, 3], longest=2) == [8, 1, 2, 3]


def test_each_slot_is_looked_up_alone_and_filled_up_with_its_anchor():
    drafter = LookupDrafter(depth=3).bind(bigram_target())
    drafter.resize(slots=3, capacity=20)
    slots, starts = torch.tensor([2, 0]), torch.tensor([0, 0])
    drafter.update_cache(
        torch.empty(0), torch.tensor([[1, 2, 3, 5, 6], [7, 8, 5, 9, 9]]), slots=slots, starts=starts
    )
    place = {"slots": slots, "starts": torch.tensor([5, 4]), "depth": 3, "sampler": None}
    # The second text, of which 4 tokens count, never held a 1 before.
    assert drafter.propose(torch.tensor([1, 1]), **place).tolist() == [[2, 3, 5], [1, 1, 1]]
    drafter.resize(slots=3, capacity=20)
    assert drafter.propose(torch.tensor([1, 1]), **place).shape == (2, 0), "it is forgotten"


def test_cycles_without_a_find_offer_no_drafts():
    target = bigram_target()  # goes round all of its tokens before one comes again
    found, stats = run(target, LookupDrafter(depth=6), [[4]], max_new_tokens=80)
    assert found == [plain_greedy(target.model, [4], 80)]
    assert stats.acceptance.cycles > 37
    assert 0 < stats.acceptance.offered[0] < 10
    assert stats.acceptance.accepted == stats.acceptance.offered


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 3, "longest": 0}])
def test_nonsense_is_refused(options):
    with pytest.raises(InputError, match="expected 1 or more"):
        LookupDrafter(**options)
