"""A step as a CUDA graph learns what it learns launched kernel by kernel."""

from functools import partial

import pytest
import torch

from domino_spec.training import train
from domino_spec.training.learning import CaptureNotice, Learning
from domino_spec.training.loss import Mixture
from domino_spec.training.trainer import Intervals
from tests.engine.replays import Replays
from tests.support.pair import SIZE
from tests.training.helpers import (
    assert_same,
    batch_of,
    blocks_of,
    loaded_bigrams,
    ready,
    weights_of,
)


def learning_of(run, recorder):
    trainer = run.trainer
    return Learning(
        run.trainer.learn.target, trainer.objective, trainer.masters,
        device=torch.device("cpu"), recorder=recorder,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_vocab": 36, "anchors": 2, "batch_size": 1},
        {"tv_weight": 0.5, "tv_start": 0.5},
        {"variant": "eagle3"},
    ],
    ids=["domino", "sampled softmax", "total variation from the middle on", "eagle3"],
)
def test_graphs_learn_the_same(tmp_path, corpus, loaded, changes):
    plain = ready(tmp_path / "plain", corpus, loaded, steps=7, **changes)
    train(plain)
    graphed = ready(tmp_path / "graphed", corpus, loaded, steps=7, **changes)
    recorder = Replays()
    graphed.trainer.learn = learning_of(graphed, recorder)
    train(graphed)
    # More padding: matrix products of other sizes, which round differently.
    torch.testing.assert_close(weights_of(plain), weights_of(graphed), rtol=1e-4, atol=1e-5)
    assert len(recorder.outputs) == (2 if "tv_weight" in changes else 1)


def test_a_step_with_more_labels_than_the_graph_has_room_for_is_not_cut(tmp_path, corpus, loaded):
    run = ready(tmp_path, corpus, loaded)
    recorder = Replays()
    learning, eager = learning_of(run, recorder), learning_of(run, None)
    mixture = Mixture.of(base=0.3, variation=0.0, device=torch.device("cpu"))
    masters, depth = run.trainer.masters, run.trainer.objective.depth
    short = batch_of([[(2, 9), (3, 8)], [(4, 7)]], length=512, vocab=SIZE)
    middling = batch_of([[(2, 12), (3, 11)], [(4, 9)]], length=512, vocab=SIZE)
    long = batch_of([[(2, 500)], [(3, 500)]], length=512, vocab=SIZE, seed=1)

    def learn(how, batch):
        masters.clear()
        blocks = blocks_of(batch, anchors=64, depth=depth)
        terms = how(blocks, mixture, blocks.total_weight)
        return terms.counts.clone(), [gradient.clone() for gradient in masters.gradients]

    for _ in range(4):
        last = learn(learning, middling)
    assert len(recorder.outputs) == 1, "the steps after the second are replayed"
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(last, learn(eager, middling))
    close(learn(learning, short), learn(eager, short))
    close(learn(learning, long), learn(eager, long))
    close(learn(learning, short), learn(eager, short))
    assert len(recorder.outputs) == 2, "a graph with more room serves both"


def test_weights_that_moved_are_captured_anew(tmp_path, corpus):
    plain = ready(tmp_path / "plain", corpus, loaded_bigrams(), steps=7)
    train(plain)
    moved = ready(tmp_path / "moved", corpus, loaded_bigrams(), steps=7)
    recorder = Replays()
    learning = moved.trainer.learn = learning_of(moved, recorder)
    target = learning.target.model

    def evaluate():
        for weight in target.parameters():
            old, weight.data = weight.data, weight.data.clone()
            old.fill_(torch.nan)
        return {}

    moved.trainer._evaluate, moved.trainer._intervals = evaluate, Intervals(4, 5, 0)
    train(moved)
    assert_same(weights_of(plain), weights_of(moved))
    assert len(recorder.outputs) == 2


def test_what_cannot_be_captured_is_launched_kernel_by_kernel(tmp_path, corpus, loaded):
    class Refusing(Replays):
        def can_record(self, work):
            work()
            return False

    plain = ready(tmp_path / "plain", corpus, loaded, steps=5)
    train(plain)
    refused = ready(tmp_path / "refused", corpus, loaded, steps=5)
    recorder = Refusing()
    refused.trainer.learn = learning_of(refused, recorder)
    train(refused)
    assert_same(weights_of(plain), weights_of(refused))
    assert not recorder.outputs


def test_a_capture_that_fails_is_told_and_the_run_goes_on(tmp_path, corpus, loaded):
    class Failing(Replays):
        def record(self, work, *, large=False):
            raise RuntimeError("operation not permitted when stream is capturing")

    plain = ready(tmp_path / "plain", corpus, loaded, steps=5)
    train(plain)
    failed = ready(tmp_path / "failed", corpus, loaded, steps=5)
    failed.trainer.learn = learning_of(failed, Failing())
    with pytest.warns(CaptureNotice, match="not captured: operation not permitted"):
        train(failed)
    assert_same(weights_of(plain), weights_of(failed))
