"""Mistakes of other implementations: misaligned labels, block lengths, batches that leak."""

import dataclasses

import numpy as np
import pytest
import torch

from domino_spec.data import Batch
from domino_spec.drafter import DraftModel
from domino_spec.drafters import BlockDrafter
from domino_spec.targets import read
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import BlockObjective
from tests.support.families import VOCAB, drafter_config, make_target, random_drafter
from tests.support.pair import bigram_target, knowing_drafter, successor
from tests.support.runs import run
from tests.training.helpers import batch_of, blocks_of


def losses_of(drafter, target, batch, *, lam=0.5, anchors=64):
    """A batch's summed loss, its gradients, its hits: every place is an anchor."""
    objective = BlockObjective(drafter, labels="soft", sharpness=1.0, chunk=64)
    blocks = blocks_of(batch, anchors=anchors, depth=drafter.config.max_depth, chunk=64)
    reading = read(
        target,
        batch.tokens,
        capture_layers=drafter.config.target_layer_ids,
        positions=batch.positions,
        documents=batch.documents if blocks.packed else None,
    )
    mixture = Mixture.of(base=lam, variation=0.0, device=torch.device("cpu"))
    terms = objective(target, reading, blocks, mixture=mixture, total_weight=1.0)
    gradients = torch.autograd.grad(terms.loss, list(drafter.parameters()))
    return terms, gradients, blocks


@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (True, 0), (False, 0)])
def test_training_and_drafts_are_aligned(shift, prefix):
    """Mistake 1: a drafter that decodes perfectly is right in training, and only so aligned."""
    target, drafter = bigram_target(), knowing_drafter(shift=shift, prefix=prefix)
    table = successor().tolist()
    text = [4]
    while len(text) < 30:
        text.append(table[text[-1]])
    supervised = torch.from_numpy(np.arange(30) > 3).unsqueeze(0)
    batch = Batch(
        torch.tensor([text]), torch.zeros(1, 30, dtype=torch.long), torch.arange(30).unsqueeze(0),
        supervised, conversations=1,
    )  # fmt: skip
    terms, _, _ = losses_of(drafter, target, batch, lam=0.0)
    # The pure prefix has base logits alone, and this backbone knows the anchor's slot only.
    assert terms.final_hits.equal(terms.counts)
    assert terms.counts.min() > 10
    other = DraftModel(dataclasses.replace(drafter.config, shift_label=not shift))
    other.load_state_dict(drafter.state_dict())
    wrong, _, _ = losses_of(other, target, batch, lam=0.0)
    assert prefix == 0 or wrong.final_hits[0] < 0.2 * wrong.counts[0]


@pytest.mark.parametrize("shift", [True, False])
def test_both_alignments_verify_as_many_positions(shift, monkeypatch):
    """Mistake 3: a block of 8 is 8 verified rows, the anchor's included, however it is aligned."""
    target = make_target("llama")
    drafter = random_drafter(drafter_config(shift=shift))
    widths = []
    forward = type(target).forward

    def counted(self, tokens, *args, **options):
        widths.append(tokens.shape[1])
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(type(target), "forward", counted)
    proposer = BlockDrafter(drafter).with_depth(drafter.config.default_depth)
    run(target, proposer, [[5, 6, 7]], max_new_tokens=30)
    assert max(widths[1:]) == drafter.config.block_size == 8


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sliding", [False, True])
def test_a_batch_teaches_what_its_documents_teach_alone(family, sliding):
    """Mistake 9, from hidden states to gradients: packing and padding change nothing."""
    shape = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
    drafter = random_drafter(drafter_config(**(shape if sliding else {})))
    target = make_target(family)
    lengths = [[(3, 12), (2, 9)], [(5, 20)], [(1, 7), (4, 2), (2, 8)]]
    batch = batch_of(lengths, length=30, vocab=VOCAB)
    together, gradients, blocks = losses_of(drafter, target, batch)
    assert blocks.packed
    total, sums, weight = 0.0, [torch.zeros_like(g) for g in gradients], 0.0
    for row in range(3):
        for number in range(int(batch.documents[row].max()) + 1):
            place = batch.documents[row] == number
            tokens = batch.tokens[row, place].unsqueeze(0)
            alone = Batch(
                tokens, torch.zeros_like(tokens), torch.arange(tokens.shape[1]).unsqueeze(0),
                batch.supervised[row, place].unsqueeze(0), conversations=1,
            )  # fmt: skip
            terms, own, part = losses_of(drafter, target, alone)
            total, weight = total + terms.loss, weight + part.total_weight
            sums = [one + two for one, two in zip(sums, own, strict=True)]
    assert blocks.total_weight == pytest.approx(weight, rel=1e-5)
    torch.testing.assert_close(together.loss, total, atol=1e-3, rtol=1e-4)
    for found, wanted in zip(gradients, sums, strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-3, rtol=2e-3)
