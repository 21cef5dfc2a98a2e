"""The softmax over a drawn part of the vocabulary: what is in it, and that it stands for all."""

from functools import partial

import pytest
import torch

from domino_spec.errors import ConfigError
from domino_spec.training import train
from domino_spec.training.config import TrainConfig
from domino_spec.training.start import derive
from domino_spec.training.vocabulary import TokenDraw
from tests.support.pair import SIZE
from tests.training.helpers import Reports, batch_of, bigram_config, blocks_of, deep_target, ready

COUNTS = torch.tensor([5, 0, 9, 0, 0, 7, 1, 0, 0, 0, 8, 0, 0, 0, 0, 2])


def test_a_step_has_its_labels_the_tokens_used_most_and_others_at_random():
    draw = TokenDraw(COUNTS, 8)
    drawn = draw(torch.tensor([2, 13, 13, 5]), seed=1)
    tokens = drawn.tokens.tolist()
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 8
    chosen = {2, 5, 13} | {10, 0, 15}
    assert chosen < set(tokens)
    stands_for = dict(zip(tokens, drawn.offsets.exp().tolist(), strict=True))
    assert [stands_for[token] for token in chosen] == [1.0] * 6
    drawn_two = set(tokens) - chosen
    assert [stands_for[token] for token in drawn_two] == pytest.approx([5, 5]), "two of ten"
    assert draw(torch.tensor([2, 13, 13, 5]), seed=1).tokens.equal(drawn.tokens)
    seeds = [draw(torch.tensor([2]), seed=seed).tokens.tolist() for seed in range(9)]
    assert len(set(map(tuple, seeds))) > 1


def test_the_sum_over_what_is_drawn_is_on_average_the_sum_over_all():
    draw = TokenDraw(COUNTS, 12)
    logits = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 2
    sums = []
    for seed in range(4000):
        tokens, offsets = draw(torch.tensor([1]), seed=seed)
        sums.append((logits[tokens] + offsets).exp().sum())
    found = torch.stack(sums)
    error = 4 * found.std() / len(found) ** 0.5
    assert abs(found.mean() - logits.exp().sum()) < error
    assert error < 0.05 * logits.exp().sum()


def test_labels_without_room_do_not_count():
    drawn = TokenDraw(COUNTS, 8)(torch.arange(7), seed=0)
    assert {2, 5, 0, 6} < set(drawn.tokens.tolist()), "the labels that answers use most"
    batch = batch_of([[(2, 40)], [(3, 40)]], length=48, vocab=16)
    plan = partial(blocks_of, batch, anchors=8, depth=4, chunk=1)
    whole, part = plan(), plan(draw=TokenDraw(COUNTS, 8))
    inside = torch.isin(whole.labels, part.vocabulary.tokens)
    assert 0 < inside.sum() < len(inside)
    for name in ("slots", "labels", "weights"):
        assert getattr(part, name).equal(getattr(whole, name)[inside])


def test_a_run_learns_over_a_part_of_the_vocabulary(tmp_path, corpus, loaded):
    reports = Reports()
    run = ready(
        tmp_path, corpus, loaded, reports, loss_vocab=SIZE - 4, anchors=2, steps=80, log_every=10,
        save_every=0, learning_rate=1e-2,
    )  # fmt: skip
    train(run)
    losses = [values["loss"] for _, values in reports.trained]
    assert losses[-1] < 0.75 * losses[0]
    accuracy = [values["accuracy"][2] for _, values in reports.trained]  # of the third draft
    assert accuracy[-1] > 0.5 > accuracy[0]


def test_a_loss_over_all_tokens_draws_none(tmp_path, corpus, loaded):
    assert ready(tmp_path, corpus, loaded, loss_vocab=SIZE).config.loss_vocab == 0
    assert ready(tmp_path, corpus, loaded).config.loss_vocab == 0, "a small vocabulary"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, 151936 // 4),
        ({"loss_vocab": 0}, 0),
        ({"loss_vocab": 900}, 900),
        ({"draft_vocab": 64}, 0),
    ],
)
def test_a_large_vocabulary_is_drawn_from(tmp_path, given, found):
    config = derive(bigram_config(tmp_path, **given), deep_target(2, 64, vocab=151936))
    assert config.loss_vocab == found


def test_two_reduced_vocabularies_contradict_each_other(tmp_path):
    values = bigram_config(tmp_path).to_dict()
    with pytest.raises(ConfigError, match="draft_vocab and loss_vocab were both given"):
        TrainConfig.from_dict({**values, "draft_vocab": 8, "loss_vocab": 8})
