"""The chunked loss against the formula written out over whole logits."""

import pytest
import torch
from torch.nn import functional as F

from domino_spec.drafter import DraftModel, MarkovHeadConfig
from domino_spec.targets import read
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import BlockObjective
from domino_spec.training.vocabulary import TokenDraw
from tests.support.families import VOCAB, drafter_config, make_target, random_drafter
from tests.training.helpers import batch_of, blocks_of

ROWS = [[(3, 20), (2, 15)], [(5, 30)]]


def written_out(drafter, target, reading, batch, blocks, *, lam, tv, soft, sharpness=1.0):
    """λ CE(base) + (1-λ) ((1-v) CE(final) + v TV), over the sum of weights: plain autograd."""
    base, final = drafter(
        target,
        captured=reading.captured,
        tokens=batch.tokens,
        anchors=blocks.anchors,
        positions=batch.positions,
        documents=batch.documents,
    )
    teacher = target.logits(reading.hidden, drafter.draft_tokens)
    columns = drafter.draft_tokens
    if blocks.vocabulary is not None:
        columns, offsets = blocks.vocabulary
        base, final, teacher = (logits[..., columns] + offsets for logits in (base, final, teacher))
    total, weights = 0.0, 0.0
    depth = base.shape[2]
    for row in range(base.shape[0]):
        for column, anchor in enumerate(blocks.anchors[row].tolist()):
            if not (
                batch.supervised[row, anchor]
                and anchor + 1 < batch.tokens.shape[1]
                and batch.supervised[row, anchor + 1]
                and batch.documents[row, anchor] == batch.documents[row, anchor + 1]
            ):
                continue
            for draft in range(depth):
                place = anchor + 1 + draft
                if place >= batch.tokens.shape[1]:
                    continue
                label = int(batch.tokens[row, place])
                if not batch.supervised[row, place]:
                    continue
                if batch.documents[row, place] != batch.documents[row, anchor]:
                    continue
                if soft:
                    truth = torch.softmax(teacher[row, place - 1] * sharpness, -1)
                else:
                    if columns is not None:
                        known = (columns == label).nonzero()
                        if not len(known):
                            continue
                        label = int(known)
                    truth = F.one_hot(torch.tensor(label), base.shape[-1]).float()
                weight = torch.exp(torch.tensor(-draft / 7.0))
                low, high = base[row, column, draft], final[row, column, draft]
                cross = -(truth * high.log_softmax(-1)).sum()
                apart = 0.5 * (high.softmax(-1) - truth).abs().sum()
                loss = lam * -(truth * low.log_softmax(-1)).sum()
                loss = loss + (1 - lam) * ((1 - tv) * cross + tv * apart)
                total, weights = total + weight * loss, weights + weight
    return total / weights, float(weights)


CASES = {
    "domino, soft": ({}, True, 0.6, 0.0),
    "domino, hard": ({}, False, 0.6, 0.0),
    "domino, total variation": ({}, True, 0.3, 0.7),
    "no shift": ({"shift": False}, True, 0.5, 0.0),
    "markov": ({"head": MarkovHeadConfig(emb_dim=8)}, True, 0.5, 0.0),
    "no head": ({"head": None}, True, 0.5, 0.4),
    "reduced vocabulary, soft": ({"draft_vocab_size": 40}, True, 0.5, 0.0),
    "reduced vocabulary, hard": ({"draft_vocab_size": 40}, False, 0.5, 0.0),
    "curriculum's end": ({}, True, 0.0, 0.0),
    "drawn vocabulary, soft": ({"draw": VOCAB - 6}, True, 0.5, 0.3),
    "drawn vocabulary, hard": ({"draw": VOCAB - 6}, False, 0.5, 0.0),
    "drawn vocabulary, no head": ({"draw": VOCAB - 6, "head": None}, True, 0.5, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_formulas(case):
    changes, soft, lam, tv = CASES[case]
    target = make_target("llama")
    shape = {name: value for name, value in changes.items() if name != "draw"}
    drafter: DraftModel = random_drafter(drafter_config(**shape))
    batch = batch_of(ROWS, length=40, vocab=VOCAB)
    objective = BlockObjective(drafter, labels="soft" if soft else "hard", sharpness=1.0, chunk=8)
    draw = TokenDraw(torch.arange(VOCAB), changes["draw"]) if "draw" in changes else None
    blocks = blocks_of(
        batch, anchors=6, depth=drafter.config.max_depth, chunk=8, known=objective.known, draw=draw
    )
    reading = read(
        target,
        batch.tokens,
        capture_layers=drafter.config.target_layer_ids,
        positions=batch.positions,
        documents=batch.documents,
    )
    wanted, weights = written_out(
        drafter, target, reading, batch, blocks, lam=lam, tv=tv, soft=soft
    )
    assert blocks.total_weight == pytest.approx(weights, rel=1e-5)
    names = [name for name, _ in drafter.named_parameters()]
    expected = torch.autograd.grad(wanted, list(drafter.parameters()), allow_unused=True)

    mixture = Mixture.of(base=lam, variation=tv, device=torch.device("cpu"))
    terms = objective(target, reading, blocks, mixture=mixture, total_weight=blocks.total_weight)
    torch.testing.assert_close(terms.loss, wanted, atol=1e-5, rtol=1e-5)
    terms.loss.backward()
    assert len(blocks.slots) > 2 * objective.chunk, "several chunks"
    for name, parameter, gradient in zip(names, drafter.parameters(), expected, strict=True):
        if gradient is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, gradient, atol=2e-6, rtol=2e-4, msg=name)


def test_hits_are_the_targets_own_choices():
    target = make_target("llama")
    drafter = random_drafter()
    batch = batch_of(ROWS, length=40, vocab=VOCAB)
    blocks = blocks_of(batch, anchors=6, depth=drafter.config.max_depth)
    reading = read(
        target,
        batch.tokens,
        capture_layers=drafter.config.target_layer_ids,
        positions=batch.positions,
        documents=batch.documents,
    )
    objective = BlockObjective(drafter, labels="soft", sharpness=1.0, chunk=64)
    mixture = Mixture.of(base=0.5, variation=0.0, device=torch.device("cpu"))
    terms = objective(target, reading, blocks, mixture=mixture, total_weight=1.0)
    _, final = drafter(
        target,
        captured=reading.captured,
        tokens=batch.tokens,
        anchors=blocks.anchors,
        positions=batch.positions,
        documents=batch.documents,
    )
    own = target.logits(reading.hidden).argmax(-1)
    hits = torch.zeros(drafter.config.max_depth)
    for slot, source, draft, weight in zip(
        blocks.slots, blocks.sources, blocks.drafts, blocks.weights, strict=True
    ):
        if weight > 0:
            hits[draft] += final.flatten(0, 2)[slot].argmax() == own.flatten()[source]
    torch.testing.assert_close(terms.final_hits, hits)
    assert terms.counts.sum() == blocks.label_count
