"""Which drafts a batch verifies, and what is learnt of them."""

import pytest
import torch

from domino_spec.engine.kernels.lengths import (
    learn,
    learn_reference,
    lengths_reference,
    verify_lengths,
)

WEIGHTS = torch.tensor([[-0.5, 0.7], [-0.2, 0.5], [0.1, 0.9]])


def made(count, depth, device, *, seed=0, spare=0):
    """Margins, weights, who samples, and who is not there."""
    random = torch.Generator().manual_seed(seed)
    margins = torch.rand(count, depth, generator=random) * 6
    weights = torch.stack((WEIGHTS.repeat(5, 1)[:depth], WEIGHTS.flip(0).repeat(5, 1)[:depth]))
    sampled = torch.rand(count, generator=random) < 0.5
    live = torch.arange(count) < count - spare
    return tuple(each.to(device) for each in (margins, weights, sampled, live))


@pytest.mark.parametrize(
    ("count", "depth", "budget", "spare"),
    [(1, 3, 2, 0), (5, 7, 1, 0), (8, 7, 3, 3), (9, 15, 5, 1)],
)
def test_kernels_do_what_the_references_do(count, depth, budget, spare, device):
    given = made(count, depth, device, spare=spare)
    found, expected = verify_lengths(*given, budget), lengths_reference(*given, budget)
    for name in ("lengths", "offsets", "rows", "steps"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.promised, expected.promised)
    torch.testing.assert_close(found.chances, expected.chances)
    accepted = (torch.arange(2 * count, device=device).view(count, 2)[:, 0] % 4).minimum(
        found.lengths
    )
    prior = torch.tensor([2.0, 0.0, 8.0], device=device)
    states = [(given[1].clone(), prior.repeat(2, depth, 1)) for _ in range(2)]
    for _ in range(3):
        learn(found, accepted, *states[0], prior)
        learn_reference(expected, accepted, *states[1], prior)
    torch.testing.assert_close(states[0], states[1])
    assert not torch.equal(states[0][0], given[1])


def test_the_likeliest_drafts_are_verified(device):
    """A sure sequence verifies more than one that is not; what fills up the batch has the rest."""
    margins = torch.tensor([[9.0, 9.0, 0.0], [0.0, 9.0, 9.0], [9.0, 9.0, 9.0]], device=device)
    weights = torch.tensor([-1.0, 1.0], device=device).repeat(2, 3, 1)
    sampled = torch.zeros(3, dtype=torch.bool, device=device)
    live = torch.tensor([True, True, False], device=device)
    found = verify_lengths(margins, weights, sampled, live, 1)
    assert found.lengths.tolist() == [2, 1, 0]
    assert found.offsets.tolist() == [0, 3, 5, 6]
    assert found.rows.tolist() == [0, 0, 0, 1, 1, 2]
    assert found.steps.tolist() == [0, 1, 2, 0, 1, 0]
    assert verify_lengths(margins, weights, sampled, live, 3).lengths.tolist() == [3, 3, 3]
    sure = torch.sigmoid(torch.tensor(8.0)).item()
    unsure = torch.sigmoid(torch.tensor(-1.0)).item()
    assert found.promised[0].item() == pytest.approx((sure + sure**2 + unsure) / 2)


@pytest.mark.parametrize("equal", [0.0, 1e4])
def test_of_equal_chances_the_earlier_draft_comes_first(equal, device):
    """Margins so large that every product is 1, or none at all: lengths are still beginnings."""
    weights = torch.tensor([0.0, 1.0], device=device).repeat(2, 4, 1)
    margins = torch.full((3, 4), equal, device=device)
    nobody = torch.zeros(3, dtype=torch.bool, device=device)
    found = verify_lengths(margins, weights, nobody, ~nobody, 2)
    assert found.lengths.tolist() == [2, 2, 2]


def test_chances_are_learnt_from_what_was_reached(device):
    """Drafts ahead by 2 are right: soon the model says so, for sampled sequences alone."""
    random = torch.Generator().manual_seed(1)
    prior = torch.tensor([2.0, 0.0, 8.0], device=device)
    weights = torch.tensor([-0.5, 0.7], device=device).repeat(2, 3, 1)
    information, untouched = prior.repeat(2, 3, 1), weights[0].clone()
    some = torch.ones(16, dtype=torch.bool, device=device)
    for _ in range(200):
        margins = (torch.rand(16, 3, generator=random) * 4).to(device)
        lengths = lengths_reference(margins, weights, some, some, 2)
        right = (margins > 2).long().cumprod(dim=1).sum(dim=1)
        learn_reference(lengths, right.minimum(lengths.lengths), weights, information, prior)
    low, high = (torch.sigmoid(weights[1, 0, 0] + weights[1, 0, 1] * m).item() for m in (1.0, 3.0))
    assert low < 0.1
    assert high > 0.9
    assert torch.equal(weights[0], untouched)
