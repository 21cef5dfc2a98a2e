"""Prompt lookup: the longest match, the latest one, as far as the text goes."""

import pytest
import torch

from domino_spec.baselines import PromptLookup
from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError
from tests.support.families import plain_greedy
from tests.support.pair import bigram_target
from tests.support.runs import make_sequences, run


def drafts(prompt, generated, *, depth=4, **options):
    (row,) = make_sequences([prompt], SamplingParams(max_new_tokens=50))
    row.take(generated)
    proposer = PromptLookup(depth=depth, **options)
    proposer.begin(1)
    return proposer.propose([row], depth).tokens[0].tolist()


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


def test_it_goes_on_learning_the_text_of_each_row_alone():
    rows = make_sequences([[1, 2, 3], [7, 8]], SamplingParams(max_new_tokens=50))
    proposer = PromptLookup(depth=3)
    proposer.begin(2)
    for row in rows:
        row.take([5])
    assert proposer.propose(rows, 3).tokens.shape == (2, 0)
    rows[0].take([6, 1])
    rows[1].take([9, 1])
    # The second row never held a 1 before: it is filled up with its last token.
    assert proposer.propose(rows, 3).tokens.tolist() == [[2, 3, 5], [1, 1, 1]]
    proposer.select([1])
    rows[1].take([7])
    assert proposer.propose(rows[1:], 3).tokens.tolist() == [[8, 5, 9]]
    proposer.begin(1)
    (fresh,) = make_sequences([[4]], SamplingParams(max_new_tokens=9))
    fresh.take([1])
    assert proposer.propose([fresh], 3).tokens.shape == (1, 0), "another run's text is forgotten"


def test_cycles_without_a_find_offer_no_drafts():
    target = bigram_target()  # goes round all of its tokens before one comes again
    found, stats = run(target, PromptLookup(depth=6), [[4]], max_new_tokens=80)
    assert found == [plain_greedy(target.model, [4], 80)]
    assert stats.rows.cycles > 37
    assert 0 < stats.rows.offered[0] < 10
    assert stats.rows.accepted == stats.rows.offered


@pytest.mark.parametrize("options", [{"depth": 0}, {"depth": 3, "longest": 0}])
def test_nonsense_is_refused(options):
    with pytest.raises(InputError, match="expected 1 or more"):
        PromptLookup(**options)


def test_no_distribution_is_claimed():
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=0)
    (row,) = make_sequences([[4, 5]], params)
    row.take([4])
    proposal = PromptLookup(depth=2).propose([row], 2)
    assert torch.equal(proposal.tokens, torch.tensor([[5, 4]]))
    assert proposal.drawn_from == [None]
