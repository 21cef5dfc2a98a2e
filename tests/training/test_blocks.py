"""Which anchors, which labels, what each weighs: against the rules written out."""

import math
from collections import Counter

import pytest
import torch

from domino_spec.training.blocks import eligible, plan_blocks, sample_anchors, step_noise
from tests.training.helpers import batch_of, blocks_of

VOCAB = 50
ROWS = [[(3, 9), (2, 7)], [(4, 20)], [(1, 2), (5, 1), (2, 6)]]
LENGTH = 26


def batch(**options):
    return batch_of(ROWS, length=LENGTH, vocab=VOCAB, **options)


def allowed_places(found):
    """Row by row, from the definition."""
    return [
        [
            place
            for place in range(LENGTH - 1)
            if found.supervised[row, place]
            and found.supervised[row, place + 1]
            and found.documents[row, place] == found.documents[row, place + 1]
        ]
        for row in range(len(ROWS))
    ]


def test_a_block_starts_where_this_token_and_the_next_are_supervised_in_one_document():
    found = batch()
    # Two answers side by side: the last token of one does not start a block in the other.
    found.supervised[0, 12:14] = True
    places = eligible(found)
    assert [row.nonzero().squeeze(1).tolist() for row in places] == allowed_places(found)
    assert not places[0, 11]
    assert places[0, 12]
    assert not places[:, -1].any()


def test_the_last_token_of_a_row_starts_no_block():
    found = batch_of([[(2, 24)]], length=26, vocab=VOCAB)
    assert eligible(found)[0].nonzero().squeeze(1).tolist() == list(range(2, 25))


def test_anchors_are_uniform_without_replacement_and_ascending():
    allowed = eligible(batch())[:1]
    places = allowed[0].nonzero().squeeze(1).tolist()
    count, draws = 5, 6000
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(draws, LENGTH, generator=generator)
    anchors, real = sample_anchors(allowed.expand(draws, -1), count, noise)
    assert real.all()
    assert (anchors.diff(dim=1) > 0).all(), "ascending, and never one twice"
    seen = Counter(anchors.flatten().tolist())
    assert set(seen) == set(places)
    share = count / len(places)
    spread = math.sqrt(draws * share * (1 - share))
    for place in places:
        assert abs(seen[place] - draws * share) < 5 * spread, place
    # Pairs too: no place draws its neighbours along.
    pairs = Counter(tuple(sorted((a, b))) for row in anchors.tolist() for a in row for b in row)
    share = count * (count - 1) / (len(places) * (len(places) - 1))
    spread = math.sqrt(draws * share * (1 - share))
    for low in places:
        for high in places:
            if low < high:
                assert abs(pairs[low, high] / 2 - draws * share) < 5 * spread, (low, high)


def test_a_row_with_fewer_places_uses_them_all_and_the_rest_weighs_nothing():
    found = batch_of([[(4, 5)], [(6, 1)], [(2, 20)]], length=26, vocab=VOCAB)
    blocks = blocks_of(found, anchors=7, depth=4)
    assert blocks.anchors.shape == (3, 7)
    assert blocks.anchors[0].tolist() == [4, 5, 6, 7, 0, 0, 0]
    assert blocks.anchors[1].tolist() == [0] * 7
    used = (blocks.slots[: blocks.label_count] // 4).tolist()  # row * anchors + anchor
    assert {place for place in used if place < 7} == {0, 1, 2, 3}
    assert not [place for place in used if 7 <= place < 14]
    assert {place for place in used if place >= 14} == set(range(14, 21))


def test_more_anchors_than_tokens():
    blocks = blocks_of(batch_of([[(1, 5)]], length=6, vocab=VOCAB), anchors=50, depth=3)
    assert blocks.anchors.shape == (1, 6)
    assert blocks.label_count == 3 + 3 + 2 + 1


@pytest.mark.parametrize("depth", [1, 5, 30])
def test_labels_and_weights_are_the_rules(depth):
    found, gamma = batch(), 3.0
    blocks = blocks_of(found, anchors=8, depth=depth, gamma=gamma)
    places = allowed_places(found)
    wanted = {}
    for row in range(len(ROWS)):
        drawn = [a for a in blocks.anchors[row].tolist() if a in places[row]]
        assert len(drawn) == min(8, len(places[row]))
        for anchor in drawn:
            column = blocks.anchors[row].tolist().index(anchor)
            for draft in range(depth):
                label = anchor + 1 + draft
                if label >= LENGTH or not found.supervised[row, label]:
                    continue
                if found.documents[row, label] != found.documents[row, anchor]:
                    continue
                slot = (row * blocks.anchors.shape[1] + column) * depth + draft
                wanted[slot] = (
                    int(found.tokens[row, label]),
                    row * LENGTH + label - 1,
                    draft,
                    pytest.approx(math.exp(-draft / gamma), rel=1e-6),
                )
    count = blocks.label_count
    told = zip(blocks.labels, blocks.sources, blocks.drafts, blocks.weights, strict=True)
    values = [tuple(v.item() for v in row) for row in told]
    assert dict(zip(blocks.slots[:count].tolist(), values[:count], strict=True)) == wanted
    assert count == len(wanted)
    total = sum(math.exp(-draft / gamma) for _, _, draft, _ in wanted.values())
    assert blocks.total_weight == pytest.approx(total, rel=1e-6)


def test_a_block_over_a_packed_documents_end_stops_there():
    found = batch_of([[(2, 4), (0, 6)]], length=14, vocab=VOCAB)  # answers side by side
    blocks = blocks_of(found, anchors=20, depth=10)
    for slot in blocks.slots[: blocks.label_count].tolist():
        anchor = int(blocks.anchors[0, slot // 10])
        label = anchor + 1 + slot % 10
        assert found.documents[0, anchor] == found.documents[0, label] >= 0
    # 4 answer tokens give 3 + 2 + 1 labels, 6 give 5 + 4 + 3 + 2 + 1.
    assert blocks.label_count == 6 + 15


def test_a_turn_of_the_user_within_a_block_is_not_learnt():
    found = batch_of([[(2, 12)]], length=14, vocab=VOCAB)
    found.supervised[0, 7:9] = False
    blocks = blocks_of(found, anchors=20, depth=10)
    labels = (blocks.sources[: blocks.label_count] + 1).tolist()
    assert not {7, 8} & set(labels)
    assert {9, 10} <= set(labels), "after the gap it goes on"


@pytest.mark.parametrize("chunk", [1, 8, 64, 1000])
def test_lists_are_padded_to_whole_chunks_with_weights_of_zero(chunk):
    blocks = blocks_of(batch(), anchors=8, depth=5, chunk=chunk)
    count = blocks.label_count
    assert len(blocks.slots) % chunk == 0
    assert len(blocks.slots) - count < chunk
    for name in ("slots", "sources", "labels", "drafts", "weights"):
        values = getattr(blocks, name)
        assert len(values) == len(blocks.slots)
        assert not values[count:].any(), name
    assert (blocks.weights[:count] > 0).all()


def test_labels_that_a_reduced_vocabulary_does_not_know_weigh_nothing():
    found = batch()
    known = torch.arange(VOCAB) % 2 == 0
    every = blocks_of(found, anchors=8, depth=5)
    some = blocks_of(found, anchors=8, depth=5, known=known)
    assert some.anchors.equal(every.anchors)
    kept = known[every.labels[: every.label_count]]
    assert 0 < some.label_count < every.label_count
    assert some.slots[: some.label_count].equal(every.slots[: every.label_count][kept])
    assert known[some.labels[: some.label_count]].all()
    assert some.total_weight == pytest.approx(float(some.weights.sum()), rel=1e-6)


def test_packed_means_more_than_one_document_in_a_row():
    assert blocks_of(batch(), anchors=2, depth=3).packed
    single = batch_of([[(2, 9)], [(3, 20)]], length=26, vocab=VOCAB)
    assert not blocks_of(single, anchors=2, depth=3).packed


def test_what_a_batch_holds_is_counted():
    found = batch()
    blocks = blocks_of(found, anchors=2, depth=3)
    assert blocks.conversations == 6
    assert blocks.supervised_tokens == int(found.supervised.sum())


def test_other_noise_draws_other_anchors_and_the_same_noise_the_same():
    found = batch()
    options = {"anchors": 4, "depth": 3, "gamma": 7.0, "chunk": 8}
    generator = torch.Generator().manual_seed(1)
    first, second = torch.rand(2, len(ROWS), LENGTH, generator=generator)
    one = plan_blocks(found, noise=first, **options)
    assert plan_blocks(found, noise=first, **options).anchors.equal(one.anchors)
    assert not plan_blocks(found, noise=second, **options).anchors.equal(one.anchors)


def test_a_batch_without_a_label_is_one_chunk_that_weighs_nothing():
    """A prompt cut so that one answer token is left has no place for a block."""
    batch = batch_of([[(9, 1)]], length=10, vocab=50)
    blocks = blocks_of(batch, anchors=4, depth=3, chunk=8)
    assert blocks.label_count == 0
    assert blocks.total_weight == 0
    assert len(blocks.slots) == 8
    assert not blocks.weights.any()


def test_anchors_follow_from_the_seed_and_the_step():
    found = {(seed, step): step_noise(seed, step, (2, 5)) for seed in (0, 1, 7) for step in (0, 1)}
    assert torch.equal(found[1, 1], step_noise(1, 1, (2, 5)))
    assert len({tuple(noise.flatten().tolist()) for noise in found.values()}) == len(found)
