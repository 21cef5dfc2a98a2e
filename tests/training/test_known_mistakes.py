"""The mistakes others made (method, section 7), each with the tests that notice it."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from domino_spec.data import Batch
from domino_spec.decoding import DominoProposer
from domino_spec.drafter import Drafter
from domino_spec.targets import read
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import BlockObjective
from tests.support.families import VOCAB, drafter_config, make_target, random_drafter
from tests.support.pair import bigram_target, knowing_drafter, successor
from tests.support.runs import run
from tests.training.helpers import batch_of, blocks_of

TESTS = Path(__file__).parents[1]

NOTICED = {
    "1 shift and no-shift misaligned": [
        "decoding/test_greedy.py::test_the_wrong_alignment_is_exact_but_useless",
        "decoding/test_greedy.py::test_a_drafter_that_knows_the_target_is_always_accepted",
        "checkpoints/test_public_layout.py::test_a_head_without_shift_label_needs_one",
        "api/test_decoder.py::test_a_useless_drafter_is_reported_once_with_what_to_check",
        "training/test_known_mistakes.py::test_training_and_drafts_are_aligned",
    ],
    "2 a slot skipped, or base logits where the head should correct": [
        "drafter/test_head.py::test_rollout_follows_the_formula",
        "drafter/test_heads.py::test_a_rollout_equals_the_forward_over_its_own_drafts",
        "drafter/test_head.py::test_built_drafter_knows_its_bigram_target",
        "training/test_loss.py::test_loss_and_gradients_are_the_formulas",
    ],
    "3 17 verified positions compared with 16": [
        "drafter/test_config.py::test_depths_of_both_alignments",
        "training/test_known_mistakes.py::test_both_alignments_verify_as_many_positions",
    ],
    "4 greedy drafts at a temperature": [
        "decoding/test_sampling.py::test_a_draft_distribution_that_was_not_drawn_from_is_noticed",
        "decoding/test_sampling.py::test_sampled_drafts_are_accepted_more_often_when_the_drafter_agrees",
        "evaluation/test_protocol.py::test_sampling_draws_drafts_and_depends_on_the_seed",
    ],
    "5 mask ids deleted, stops a cycle late, overruns": [
        "decoding/test_stopping.py::test_tokens_equal_to_the_mask_id_survive",
        "decoding/test_stopping.py::test_eos_inside_a_block_ends_the_row_there",
        "decoding/test_stopping.py::test_max_new_tokens_is_exact",
        "decoding/test_greedy.py::test_long_context_to_the_last_position",
        "api/test_decoder.py::test_stop_strings_end_inside_a_block",
    ],
    "6 the whole GRU run again for every draft": [
        "drafter/test_head.py::test_rollout_costs_what_it_should",
    ],
    "7 λ silently 0": [
        "training/test_schedule.py::test_unknown_steps_are_an_error_and_never_a_lambda_of_zero",
        "training/test_schedule.py::test_lambda_falls_linearly_from_one_to_zero",
        "training/test_trainer.py::test_lambda_is_in_the_loss",
        "training/test_trainer.py::test_what_a_run_reports",
    ],
    "8 half-precision weights without masters": [
        "training/test_masters.py::test_small_steps_add_up_where_half_precision_would_round_each_away",
        "training/test_masters.py::test_gradients_are_summed_in_full_precision",
        "training/test_resume.py::test_half_precision_goes_on_exactly_too",
        "training/test_world.py::test_half_precision_is_close",
    ],
    "9 hidden states wrong in a batch": [
        "targets/test_reading.py::test_packed_documents_are_read_as_if_alone",
        "targets/test_reading.py::test_rows_of_one_document_need_no_mask_and_padding_is_harmless",
        "targets/test_target.py::test_roll_back_of_ragged_rows_is_exact",
        "drafter/test_parity.py::test_packed_documents_do_not_see_each_other",
        "training/test_known_mistakes.py::test_a_batch_teaches_what_its_documents_teach_alone",
    ],
    "10 training and serving with two forwards": [
        "drafter/test_parity.py::test_block_parallel_forward_equals_cycle_by_cycle_forward",
        "evaluation/test_simulate.py::test_random_drafters",
        "training/test_trainer.py::test_the_saved_drafter_decodes_as_the_simulation_said",
    ],
}


@pytest.mark.parametrize("mistake", NOTICED)
def test_every_mistake_has_its_tests(mistake):
    for place in NOTICED[mistake]:
        file, name = place.split("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert name in functions, f"{place} is gone: what notices {mistake!r} now?"


def test_all_ten_are_here():
    assert [int(mistake.split()[0]) for mistake in NOTICED] == list(range(1, 11))


def losses_of(drafter, target, batch, *, lam=0.5, anchors=64):
    """A batch's summed loss, its gradients, its hits: every place is an anchor."""
    objective = BlockObjective(drafter, labels="soft", sharpness=1.0, chunk=64)
    blocks = blocks_of(batch, anchors=anchors, depth=drafter.config.max_depth, chunk=64)
    reading = read(
        target,
        batch.tokens,
        taps=drafter.config.target_layer_ids,
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
    other = Drafter(dataclasses.replace(drafter.config, shift_label=not shift))
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
    proposer = DominoProposer(drafter, target, depth=drafter.config.default_depth)
    run(target, proposer, [[5, 6, 7]], max_new_tokens=30)
    assert max(widths[1:]) == drafter.config.block_size == 8


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("sliding", [False, True])
def test_a_batch_teaches_what_its_documents_teach_alone(family, sliding):
    """Mistake 9, from taps to gradients: packing and padding change nothing."""
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
