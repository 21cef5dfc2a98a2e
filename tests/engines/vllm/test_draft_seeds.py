"""Which seeds the plugin hands to vLLM's speculator; needs no vLLM."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from domino_spec.plugins.vllm.draft_seeds import draft_seeds, salt_drafts

SEEDS = torch.tensor([0, 1, 2, 2, -(2**63)])


def test_every_request_and_cycle_has_a_seed_that_verification_has_not():
    rows = torch.arange(len(SEEDS))
    cycles = [draft_seeds(SEEDS, rows, torch.full((5,), start)) for start in range(100)]
    drawn = torch.stack(cycles)
    assert torch.equal(drawn[:, 2], drawn[:, 3]), "a seed gives the same drafts in every slot"
    assert len(drawn.unique()) == 100 * 4
    assert not torch.isin(drawn, SEEDS).any()


def test_only_slots_of_the_batch_change():
    drawn = draft_seeds(SEEDS, torch.tensor([3, 1]), torch.tensor([7, 9], dtype=torch.int32))
    assert (drawn != SEEDS).tolist() == [False, True, False, True, False]
    assert SEEDS.tolist() == [0, 1, 2, 2, -(2**63)], "verification reads them too"


class Ours(nn.Module):
    """Stands for a drafter of ours."""


@pytest.fixture
def speculator(monkeypatch):
    """Stands for vLLM's, and returns what it was called with."""

    class Speculator:
        def __init__(self, model, draft_logits):
            self.model, self.draft_logits = model, draft_logits

        def propose(self, input_batch, num_rejected, seeds, dummy_run=False):
            return seeds, dummy_run

    path = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"
    monkeypatch.setitem(sys.modules, path, SimpleNamespace(DFlashSpeculator=Speculator))
    salt_drafts.cache_clear()
    for _ in range(2):  # every model asks for it
        salt_drafts(Ours)
    yield Speculator
    salt_drafts.cache_clear()


def batch(*, length):
    return SimpleNamespace(
        num_reqs=1, idx_mapping=torch.tensor([2]), seq_lens=torch.tensor([length, 0])
    )


def test_a_cycle_is_told_by_the_tokens_kept(speculator):
    rows, logits = torch.tensor([2]), torch.zeros(1)
    found, dummy = speculator(Ours(), logits).propose(
        batch(length=9), torch.tensor([2]), seeds=SEEDS, dummy_run=True
    )
    assert torch.equal(found, draft_seeds(SEEDS, rows, torch.tensor([7])))
    assert dummy is True


@pytest.mark.parametrize(("model", "draft_logits"), [(nn.Module(), torch.zeros(1)), (Ours(), None)])
def test_others_drafts_and_greedy_ones_are_left_alone(speculator, model, draft_logits):
    made = speculator(model, draft_logits)
    found, _ = made.propose(batch(length=9), torch.tensor([2]), SEEDS)
    assert found is SEEDS
