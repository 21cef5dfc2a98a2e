"""The baselines are trained by the same trainer: same loss, same checkpoints, same evaluation."""

import math

import pytest
import torch

from domino_spec.checkpoints import load_drafter
from domino_spec.drafter import Eagle3, Medusa
from domino_spec.drafters import open_drafter
from domino_spec.errors import TrainingError
from domino_spec.targets import read
from domino_spec.training import TrainConfig, train
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import make_objective
from domino_spec.training.start import baseline_config, derive
from tests.support.baselines import random_baseline
from tests.support.families import VOCAB, make_target
from tests.support.pair import SIZE
from tests.support.runs import run as decode_run
from tests.training.helpers import (
    Reports,
    assert_same,
    batch_of,
    blocks_of,
    deep_target,
    ready,
    state_of,
)

KINDS = ("medusa", "eagle3")
RATE = 0.04  # one-hot states must be outweighed, not turned
ROWS = [[(4, 14), (0, 12)], [(3, 30)]]  # the second document has nothing before its answer


def read_batch(target, drafter, batch):
    return read(
        target, batch.tokens, capture_layers=drafter.capture_layers, positions=batch.positions,
        documents=batch.documents,
    )  # fmt: skip


def one_by_one(drafter, target, reading, batch, row, anchor):
    """Logits of every draft after one anchor, from its own document alone."""
    inside = (batch.documents[row] == batch.documents[row, anchor]).nonzero().squeeze(1)
    start, tokens = int(inside[0]), batch.tokens[row : row + 1, inside]
    captured = reading.captured[row : row + 1, inside]
    if isinstance(drafter, Medusa):
        return target.logits(drafter(captured[0, anchor - start - 1]), drafter.draft_tokens)
    hidden = drafter(
        target, captured=captured, tokens=tokens, anchors=torch.tensor([[anchor - start]]),
        positions=torch.arange(len(inside)).unsqueeze(0),
    )  # fmt: skip
    return target.logits(hidden[0, 0], drafter.draft_tokens)


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("reduced", [None, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_the_formulas(kind, reduced, labels):
    target = make_target("llama")
    drafter = random_baseline(kind, draft_vocab_size=reduced)
    batch = batch_of(ROWS, length=40, vocab=VOCAB)
    objective = make_objective(drafter, labels=labels, sharpness=1.0, chunk=8)
    blocks = blocks_of(
        batch, anchors=6, depth=objective.depth, chunk=8, known=objective.known,
        history=objective.history,
    )  # fmt: skip
    reading = read_batch(target, drafter, batch)
    wanted, total = torch.zeros(()), 0.0
    for row, anchors in enumerate(blocks.anchors.tolist()):
        for anchor in sorted(set(anchors) - {0}):
            logits = one_by_one(drafter, target, reading, batch, row, anchor)
            for draft in range(objective.depth):
                index = anchor + 1 + draft
                inside = index < 40 and batch.supervised[row, index]
                if not inside or batch.documents[row, index] != batch.documents[row, anchor]:
                    continue
                label = int(batch.tokens[row, index])
                if labels == "hard":
                    if reduced and label >= reduced:
                        continue
                    truth = torch.nn.functional.one_hot(torch.tensor(label), logits.shape[-1])
                else:
                    own = target.logits(reading.hidden[row, index - 1], drafter.draft_tokens)
                    truth = own.softmax(-1)
                weight = float(torch.exp(torch.tensor(-draft / 7.0)))
                wanted = wanted - weight * (truth * logits[draft].log_softmax(-1)).sum()
                total += weight
    assert blocks.total_weight == pytest.approx(total, rel=1e-5)
    expected = torch.autograd.grad(wanted / total, list(drafter.parameters()))
    mixture = Mixture.of(base=0.4, variation=0.0, device=torch.device("cpu"))  # λ changes nothing
    terms = objective(target, reading, blocks, mixture=mixture, total_weight=blocks.total_weight)
    torch.testing.assert_close(terms.loss, wanted / total, atol=1e-5, rtol=1e-5)
    terms.loss.backward()
    assert len(blocks.slots) > 2 * objective.chunk, "several chunks"
    for (name, parameter), gradient in zip(drafter.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=5e-6, rtol=5e-4, msg=name)


def test_an_anchor_needs_a_token_before_it():
    batch = batch_of(ROWS, length=40, vocab=VOCAB)
    for history, first in ((0, 18), (1, 19)):
        anchors = blocks_of(batch, anchors=40, depth=3, history=history).anchors[0]
        assert min(a for a in anchors.tolist() if a >= 18) == first
    assert all(make_objective(random_baseline(k), labels="soft", sharpness=1.0, chunk=8).history
               for k in KINDS)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def learnt(request, tmp_path_factory, corpus, loaded):
    """A run long enough to learn something."""
    reports = Reports()
    run = ready(
        tmp_path_factory.mktemp("learnt") / "run", corpus, loaded, reports, variant=request.param,
        steps=80, learning_rate=RATE, eval_every=80, log_every=20, save_every=0,
    )  # fmt: skip
    before = run.evaluate()
    outcome, folder = train(run)
    return run, reports, before, outcome, folder


def test_the_loss_falls_and_tokens_a_cycle_rise(learnt):
    run, reports, before, outcome, _ = learnt
    losses = [values["loss"] for _, values in reports.trained]
    assert losses[-1] < 0.7 * math.log(SIZE), "far from guessing"
    assert len(reports.trained[0][1]["accuracy"]) == run.config.draft_steps == 4
    found = [values["tokens_per_cycle"] for _, values in reports.evaluated]
    assert [step for step, _ in reports.evaluated] == [80]
    assert before["tokens_per_cycle"] < 2.0 < 2.8 < found[-1]
    assert outcome.finished


def test_the_saved_drafter_opens_and_decodes_as_training_measured(learnt, loaded):
    run, _, _, _, folder = learnt
    opened = open_drafter(folder, loaded.target)
    assert opened.kind == run.config.variant
    stored = load_drafter(folder, any_kind=True)
    assert stored.config == run.drafter.config
    assert stored.provenance.target_id == "bigram"
    for (name, one), two in zip(
        run.drafter.named_parameters(), stored.drafter.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    found, stats = decode_run(loaded.target, opened, [[4, 9], [11]], max_new_tokens=30)
    assert stats.tokens_per_cycle > 2.5
    assert all(len(answer) == 30 for answer in found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_goes_on_exactly(kind, tmp_path, corpus, loaded):
    changes = {"variant": kind, "save_every": 5, "steps": 10}
    whole = ready(tmp_path / "whole", corpus, loaded, **changes)
    train(whole)

    class Stop:
        def report(self, step, values):
            if step == 8:
                raise RuntimeError("stopped")

        def close(self):
            pass

    broken = ready(tmp_path / "run", corpus, loaded, Stop(), **changes)
    with pytest.raises(RuntimeError, match="stopped"):
        train(broken)
    again = ready(tmp_path / "run", corpus, loaded, resume=True, **changes)
    assert again.trainer.step == 5
    outcome, _ = train(again)
    assert outcome.finished
    assert_same(state_of(again), state_of(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_start_takes_the_weights_of_the_same_kind(kind, tmp_path, corpus, loaded, learnt):
    trained, _, _, _, folder = learnt
    if trained.config.variant != kind:
        with pytest.raises(TrainingError, match="another drafter"):
            ready(tmp_path / "run", corpus, loaded, variant=kind, init=str(folder))
        return
    run = ready(tmp_path / "run", corpus, loaded, variant=kind, init=str(folder))
    assert_same(run.trainer.masters.state_dict(), trained.trainer.masters.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_has_full_masters(kind, tmp_path, corpus, loaded):
    run = ready(tmp_path / "run", corpus, loaded, variant=kind, dtype="bfloat16", steps=2)
    train(run)
    weights = run.trainer.masters.state_dict()
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert any(not w.equal(w.bfloat16().float()) for w in weights.values())


def test_shapes_come_from_the_target_and_the_size():
    target = deep_target(layers=6, hidden=32)
    common = {"target": "t", "data": ["d"], "out": "o"}
    medusa = derive(TrainConfig(**common, variant="medusa", size="small"), target)
    assert (medusa.draft_steps, medusa.layers, medusa.mask_token_id) == (5, 1, None)
    config = baseline_config(medusa, target)
    assert (config.num_heads, config.num_layers) == (5, 1)
    eagle = derive(TrainConfig(**common, variant="eagle3", draft_steps=3), target)
    config = baseline_config(eagle, target)
    assert config.unrolled == 3
    assert config.tapped_layers == (1, 2, 3)
    assert config.vocab_size == config.output_vocab_size == target.vocab_size
    assert config.num_target_layers == 6
    again = derive(TrainConfig.from_dict(eagle.to_dict()), target)
    assert again == eagle, "what is written down means the same"
    domino = derive(TrainConfig(**common), target)
    labels = [c.anchors * (c.draft_steps or c.block_size) for c in (medusa, eagle, domino)]
    assert max(labels) - min(labels) <= 8, "as many labels a step"


def test_a_fresh_medusa_says_what_the_target_says():
    target = make_target("qwen3")
    drafter = Medusa.fresh(random_baseline("medusa").config, seed=0)
    states = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(target.logits(drafter(states)[:, 2]), target.logits(states))
    one, two = (Eagle3.fresh(random_baseline("eagle3").config, seed=s) for s in (0, 0))
    assert torch.equal(one.fc.weight, two.fc.weight)
