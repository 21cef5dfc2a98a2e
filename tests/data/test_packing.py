from __future__ import annotations

import numpy as np
import pytest
import torch

from domino_spec.data import PackedBatches, plan_epoch
from domino_spec.data.corpus import Collector
from domino_spec.errors import DataError
from domino_spec.training.blocks import plan_blocks
from tests.data.corpora import make_corpus, random_lengths

LENGTHS = random_lengths(120, low=5, high=60)


def packed(corpus=None, **changes) -> PackedBatches:
    values = {"rows": 3, "length": 64, "seed": 5, "pad_token": 7, **changes}
    return PackedBatches(corpus or make_corpus(LENGTHS), **values)


def same(left, right) -> bool:
    names = ("tokens", "documents", "positions", "supervised")
    tensors = all(torch.equal(getattr(left, n), getattr(right, n)) for n in names)
    return tensors and left.conversations == right.conversations


def epoch_rows(batches: PackedBatches):
    """All rows of the current epoch; batches of one row end where it ends."""
    epoch = batches.epoch
    while batches.epoch == epoch:
        batch = batches.next()
        yield batch.tokens[0], batch.documents[0], batch.positions[0], batch.supervised[0]


def test_every_token_is_there_once_an_epoch_whole_and_in_order():
    corpus = make_corpus(LENGTHS)
    batches = packed(corpus, rows=1)
    for _ in range(2):
        found = []
        for tokens, documents, positions, supervised in epoch_rows(batches):
            for document in range(int(documents.max()) + 1):
                mask = documents == document
                ids = tokens[mask].tolist()
                example = corpus[ids[0] // 2048]
                assert ids == example.tokens.tolist()
                assert positions[mask].tolist() == list(range(len(ids)))
                assert supervised[mask].tolist() == example.supervised.tolist()
                found += ids
            padding = documents == -1
            assert (tokens[padding] == 7).all()
            assert not supervised[padding].any()
            # Documents follow one another without a gap, padding comes last.
            order = torch.where(padding, int(documents.max()) + 1, documents)
            assert (order.diff() >= 0).all()
            assert (positions < 64).all()
        wanted = np.concatenate([corpus[i].tokens for i in range(len(corpus))]).tolist()
        assert sorted(found) == sorted(wanted)
        assert len(set(found)) == len(found)


def test_epochs_differ_and_are_repeatable():
    lengths = np.array(LENGTHS)
    plans = [plan_epoch(lengths, length=64, seed=5, epoch=epoch) for epoch in (0, 1, 0)]
    assert plans[0] == plans[2] != plans[1]
    assert plan_epoch(lengths, length=64, seed=6, epoch=0) != plans[0]
    first, second = packed(), packed()
    assert all(same(first.next(), second.next()) for _ in range(100))
    assert first.epoch == second.epoch > 1


def test_the_plan_is_the_same_on_every_machine():
    plan = plan_epoch(np.array([5, 60, 30, 30, 4, 20, 64, 10]), length=64, seed=1, epoch=2)
    assert plan == [[1], [5, 7, 0], [3, 2, 4], [6]]


def test_rows_are_not_ordered_by_how_full_they_are():
    corpus = make_corpus(random_lengths(600, low=5, high=60))
    fills = [
        int((documents >= 0).sum()) for _, documents, _, _ in epoch_rows(packed(corpus, rows=1))
    ]
    half = len(fills) // 2
    assert abs(np.mean(fills[:half]) - np.mean(fills[half:])) < 4
    assert fills != sorted(fills, reverse=True)


@pytest.mark.parametrize("stop", [1, 7, 30])
def test_a_run_goes_on_in_the_middle_of_an_epoch(stop):
    corpus = make_corpus(LENGTHS)
    whole = packed(corpus)
    for _ in range(stop):
        whole.next()
    state = whole.state_dict()
    later = packed(corpus)
    later.load_state_dict(state)
    assert later.epoch == whole.epoch
    assert all(same(whole.next(), later.next()) for _ in range(40))


def test_a_position_from_before_rows_were_concatenated_is_taken():
    state = packed().state_dict()
    del state["concatenate"]
    packed().load_state_dict(state)
    with pytest.raises(DataError, match="belongs to concatenate None"):
        packed(concatenate=0.5).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"length": 80}, "length 64"),
        ({"rows": 4}, "rows 3"),
        ({"seed": 6}, "seed 5"),
        ({"concatenate": 0.5}, "concatenate 0.0"),
        ({"world": 2}, "world 1"),
        ({"corpus": make_corpus(LENGTHS[:-1])}, "fingerprint"),
    ],
)
def test_a_state_of_something_else_is_refused(changes, named):
    state = packed().state_dict()
    with pytest.raises(DataError, match=f"belongs to {named}"):
        packed(**changes).load_state_dict(state)


def test_a_concatenated_row_is_one_document_and_holds_the_same_tokens():
    corpus = make_corpus(LENGTHS)
    apart, some = packed(corpus, rows=1), packed(corpus, rows=1, concatenate=0.5)
    alike = []
    for plain, row in zip(epoch_rows(apart), epoch_rows(some), strict=True):
        tokens, documents, positions, supervised = row
        assert tokens.equal(plain[0])
        assert supervised.equal(plain[3])
        alike.append(documents.equal(plain[1]))
        if not alike[-1]:
            assert set(documents.tolist()) <= {0, -1}
            assert positions.equal(torch.arange(64))
    several = [int(row[1].max()) > 0 for row in epoch_rows(packed(corpus, rows=1))]
    apart_now = sum(same for same, many in zip(alike, several, strict=True) if many)
    assert 0.3 < apart_now / sum(several) < 0.7


def test_blocks_of_a_concatenated_row_begin_and_end_in_answers():
    batch = packed(concatenate=1.0).next()
    blocks = plan_blocks(
        batch, anchors=32, depth=4, gamma=5.0, noise=torch.rand(batch.tokens.shape), chunk=1
    )
    anchors = blocks.anchors.flatten()[blocks.slots // 4]
    rows = blocks.slots // (4 * blocks.anchors.shape[1])
    assert batch.supervised[rows, anchors].all()
    assert batch.supervised[rows, anchors + 1 + blocks.drafts].all()
    assert not blocks.packed


def test_ranks_share_a_global_batch_in_order():
    corpus = make_corpus(LENGTHS)
    single = packed(corpus, rows=6)
    ranks = [packed(corpus, rows=2, rank=rank, world=3) for rank in range(3)]
    for _ in range(30):
        whole, parts = single.next(), [rank.next() for rank in ranks]
        for name in ("tokens", "documents", "positions", "supervised"):
            joined = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(getattr(whole, name), joined)
        assert whole.conversations == sum(part.conversations for part in parts)
    assert single.batches_per_epoch == ranks[0].batches_per_epoch


def test_long_conversations_are_cut_and_those_without_answers_left_out():
    corpus = make_corpus([30, 100, 100], prompt=10)
    batches = packed(corpus, rows=1, length=40)
    assert (batches.cut, batches.left_out) == (2, 0)
    ids = torch.cat([tokens[documents >= 0] for tokens, documents, _, _ in epoch_rows(batches)])
    assert sorted(ids.tolist()) == sorted([*range(30), *range(2048, 2088), *range(4096, 4136)])
    late = make_corpus([30, 100], prompt=20)
    late_corpus = packed(late, rows=1, length=25)
    assert (late_corpus.cut, late_corpus.left_out) == (2, 0)
    with pytest.raises(DataError, match="pack longer rows"):
        packed(late, rows=1, length=15)


def test_a_conversation_whose_answer_lies_after_the_row_is_left_out():
    collector = Collector(vocab_size=2048)
    collector.add(np.arange(30), np.arange(30) >= 5, "", "")
    collector.add(np.arange(100), np.arange(100) >= 60, "", "")
    batches = packed(collector.corpus(), rows=1, length=40)
    assert (batches.cut, batches.left_out) == (0, 1)
    assert batches.next().conversations == 1
    assert batches.epoch == 1


def test_a_corpus_smaller_than_a_batch_still_fills_it():
    batches = packed(make_corpus([10, 12, 60]), rows=8)
    batch = batches.next()
    assert batch.tokens.shape == (8, 64)
    assert (batch.documents[:, 0] == 0).all()
    assert batches.epoch == 4


@pytest.mark.parametrize("length", [512, 1024])
def test_little_is_padding(length):
    lengths = np.array(random_lengths(76_000))
    plan = plan_epoch(lengths, length=length, seed=0, epoch=0)
    assert 1 - lengths.sum() / (len(plan) * length) < 0.05
    assert sorted(index for row in plan for index in row) == list(range(len(lengths)))
    assert max(lengths[row].sum() for row in plan) <= length


def test_the_padding_share_is_what_the_batches_show():
    batches = packed(rows=1)
    share = batches.padding_share
    shown = [float((documents < 0).float().mean()) for _, documents, _, _ in epoch_rows(batches)]
    assert share == pytest.approx(np.mean(shown))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rows": 0}, "rows is 0"), ({"rank": 2, "world": 2}, "rank is 2"), ({"length": 1}, "length")],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(DataError, match=message):
        packed(**changes)
