"""Which drafts a batch verifies, and what is learnt of them."""

import pytest
import torch

from domino_spec.drafters import drafter_of
from domino_spec.engine.engine import Engine
from domino_spec.engine.kernels import lengths as module
from domino_spec.engine.kernels.lengths import (
    MILLION,
    Sequences,
    learn,
    learn_reference,
    lengths_reference,
    margins,
    pad_tokens,
    padded_places,
    verify_lengths,
)
from domino_spec.engine.model_runner import Plan
from tests.engine.runs import make_requests, own
from tests.support.pair import bigram_target, knowing_drafter, successor

SPARE = 99

WEIGHTS = torch.tensor([[-0.5, 0.7], [-0.2, 0.5], [0.1, 0.9]])


def batch_of(count, device, *, spare=0, temperature=None):
    """Sequences in slots of their own, the last ones in the spare one."""
    slots = torch.tensor([*range(5, 5 + count - spare), *[SPARE] * spare], device=device)
    return Sequences(slots, 3 * torch.arange(count, device=device), SPARE, temperature)


def made(count, depth, device, *, spare=0):
    """Margins, weights, and a batch of which some sample."""
    random = torch.Generator().manual_seed(0)
    found = torch.rand(count, depth, generator=random) * 6
    weights = torch.stack((WEIGHTS.repeat(6, 1), WEIGHTS.flip(0).repeat(6, 1)))  # of more places
    heat = (torch.rand(count, generator=random) - 0.5).clamp(min=0).to(device)
    batch = batch_of(count, device, spare=spare, temperature=heat if count > 1 else None)
    return found.to(device), weights.to(device), batch


@pytest.mark.parametrize(
    ("count", "depth", "budget", "spare"),
    [(1, 3, 2, 0), (5, 7, 1, 0), (8, 7, 5, 3), (9, 15, 5, 1)],
)
def test_kernels_do_what_the_references_do(count, depth, budget, spare, device):
    given = made(count, depth, device, spare=spare)
    found, expected = verify_lengths(*given, budget), lengths_reference(*given, budget)
    for name in ("verified", "offsets", "rows", "steps", "slots", "places"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.columns, expected.columns, rtol=1e-5, atol=1)
    torch.testing.assert_close(found.chances, expected.chances)
    tokens = torch.arange(len(found.rows), device=device).unsqueeze(1) * 7
    assert torch.equal(
        pad_tokens(tokens, found, depth + 1), tokens[padded_places(expected, depth + 1), 0]
    )
    accepted = (torch.arange(2 * count, device=device).view(count, 2)[:, 0] % 4).minimum(
        found.verified
    )
    prior = torch.tensor([2.0, 0.0, 8.0], device=device)
    states = [(given[1].clone(), prior.repeat(2, 18, 1)) for _ in range(2)]
    for _ in range(3):
        learn(found, accepted, *states[0], prior)
        learn_reference(expected, accepted, *states[1], prior)
    torch.testing.assert_close(states[0], states[1])
    assert not torch.equal(states[0][0], given[1])
    assert torch.equal(states[0][0][:, depth:], given[1][:, depth:])


def test_the_likeliest_drafts_are_verified(device):
    """A sure sequence verifies more than one that is not; what fills up the batch has the rest."""
    ahead = torch.tensor([[9.0, 9.0, 0.0], [0.0, 9.0, 9.0], [9.0, 9.0, 9.0]], device=device)
    weights = torch.tensor([-1.0, 1.0], device=device).repeat(2, 3, 1)
    batch = batch_of(3, device, spare=1)
    found = verify_lengths(ahead, weights, batch, 1)
    assert found.verified.tolist() == [2, 1, 0]
    assert found.offsets.tolist() == [0, 3, 5, 6]
    assert found.rows.tolist() == [0, 0, 0, 1, 1, 2]
    assert found.steps.tolist() == [0, 1, 2, 0, 1, 0]
    assert found.slots.tolist() == [5, 5, 5, 6, 6, SPARE]
    assert found.places.tolist() == [0, 1, 2, 3, 4, 6]
    assert verify_lengths(ahead, weights, batch, 3).verified.tolist() == [3, 3, 3]
    sure, unsure = (torch.sigmoid(torch.tensor(x)).item() for x in (8.0, -1.0))
    promised = found.columns[0, 1].item() / MILLION
    assert promised == pytest.approx((sure + sure**2 + unsure) / 2, abs=1e-5)


@pytest.mark.parametrize("equal", [0.0, 1e4])
def test_of_equal_chances_the_earlier_draft_comes_first(equal, device):
    """Margins so large that every product is 1, or none at all: lengths are still beginnings."""
    weights = torch.tensor([0.0, 1.0], device=device).repeat(2, 4, 1)
    ahead = torch.full((3, 4), equal, device=device)
    found = verify_lengths(ahead, weights, batch_of(3, device), 2)
    assert found.verified.tolist() == [2, 2, 2]


@pytest.mark.parametrize("most", [module.MOST_READ, 1], ids=["kernel", "reference"])
def test_margins_of_a_broken_drafter_teach_nothing(most, device, monkeypatch):
    """What is no number is no margin."""
    monkeypatch.setattr(module, "MOST_READ", most)
    low, none = -torch.inf, torch.nan
    logits = torch.tensor([[[1.0, 3.5, 2.0], [low, low, low]], [[1e9, 0.0, low], [3.0, low, low]]])
    found = margins(logits.to(device))
    assert found.tolist() == [[1.5, 0.0], [16.0, 16.0]]
    assert margins(torch.full((1, 1, 3), none, device=device)).isfinite().all()
    assert margins(torch.ones(2, 3, 1, device=device)).tolist() == [[0.0] * 3] * 2


def test_chances_are_learnt_from_what_was_reached(device):
    """Drafts ahead by 2 are right: soon the model says so, for sampled sequences alone."""
    random = torch.Generator().manual_seed(1)
    prior = torch.tensor([2.0, 0.0, 8.0], device=device)
    weights = torch.tensor([-0.5, 0.7], device=device).repeat(2, 3, 1)
    information, untouched = prior.repeat(2, 3, 1), weights[0].clone()
    batch = batch_of(16, device, temperature=torch.ones(16, device=device))
    for _ in range(200):
        ahead = (torch.rand(16, 3, generator=random) * 4).to(device)
        lengths = lengths_reference(ahead, weights, batch, 2)
        right = (ahead > 2).long().cumprod(dim=1).sum(dim=1)
        learn_reference(lengths, right.minimum(lengths.verified), weights, information, prior)
    low, high = (torch.sigmoid(weights[1, 0, 0] + weights[1, 0, 1] * m).item() for m in (1.0, 3.0))
    assert low < 0.1
    assert high > 0.9
    assert torch.equal(weights[0], untouched)


@pytest.mark.slow
@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_cycles_of_different_lengths_are_right(heat, device):
    """Whole cycles by kernels alone, of two sequences and one that fills up the batch."""
    table = successor(64)
    target = bigram_target(table)
    target.model.to(device)
    drafter = drafter_of(knowing_drafter(shift=True, prefix=1, table=table, head_dim=16))
    texts = []
    for plan in (Plan(0, sampled=heat > 0), Plan(3, budget=1, sampled=heat > 0)):
        engine = Engine(own(target), drafter.with_depth(3), slots=3, capacity=24, graphs=False)
        how = {"temperature": heat, "accept": "coupled", "max_new_tokens": 6}
        sequences = make_requests([[4, 9, 4], [7, 1]], seeds=[3, 4], **how)
        for sequence in sequences:
            engine.add_request(sequence)
        engine.step()
        found = [list(sequence.output[:1]) for sequence in sequences]
        slots = torch.tensor([0, 1, engine.slots.spare], device=device)
        while min(map(len, found)) < 6:
            report = engine.runner.run_cycle(slots, plan).tolist()
            for own_text, row in zip(found, report[:2], strict=True):
                own_text += row[1 : row[0] + 2]
        texts.append([text[:6] for text in found])
    assert texts[0] == texts[1]
    assert sum(row[5] for row in report) == 3  # the budget
