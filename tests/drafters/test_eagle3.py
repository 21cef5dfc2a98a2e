"""EAGLE-3's training-time test: what a chain sees, and how it learns."""

import torch

from domino_spec.drafter import Eagle3
from tests.support.baselines import eagle3_config, random_baseline
from tests.support.families import VOCAB, make_target

LENGTH = 30


def trained_logits(drafter, target, tokens, anchors, steps, **packed):
    captured = packed.pop("captured", None)
    if captured is None:
        captured = target.forward(
            tokens, target.new_cache(len(tokens)), capture_layers=drafter.capture_layers
        ).captured
    positions = packed.pop("positions", torch.arange(tokens.shape[1]).expand_as(tokens))
    with torch.no_grad():
        hidden = drafter(
            target, captured=captured, tokens=tokens, anchors=anchors, positions=positions,
            steps=steps,
            **packed,
        )  # fmt: skip
        return drafter.base_logits(target, hidden)


def test_a_chain_sees_neither_other_chains_nor_the_features_after_its_start():
    target, drafter = make_target("llama"), random_baseline("eagle3")
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    captured = target.forward(
        tokens, target.new_cache(1), capture_layers=drafter.capture_layers
    ).captured
    one = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, captured=captured)
    many = trained_logits(
        drafter, target, tokens, torch.tensor([[4, 8, 9, 10, 22]]), 5, captured=captured
    )
    torch.testing.assert_close(many[:, 2], one[:, 0], atol=1e-5, rtol=1e-5)
    spoiled = captured.clone()
    spoiled[:, 9:] += 3.0  # the anchor's own features and all later ones: unknown when it drafts
    again = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, captured=spoiled)
    torch.testing.assert_close(again, one, atol=1e-5, rtol=1e-5)
    spoiled[:, 8] += 3.0
    other = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, captured=spoiled)
    assert (other - one).abs().max() > 0.01


def test_packed_documents_do_not_see_each_other():
    target, drafter = make_target("llama"), random_baseline("eagle3")
    first = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    second = torch.randint(0, VOCAB, (1, 15), generator=torch.Generator().manual_seed(2))
    captured = [
        target.forward(t, target.new_cache(1), capture_layers=drafter.capture_layers).captured
        for t in (first, second)
    ]
    alone = trained_logits(drafter, target, second, torch.tensor([[2, 6]]), 4, captured=captured[1])
    packed = trained_logits(
        drafter, target, torch.cat((first, second), dim=1), torch.tensor([[14, 18]]), 4,
        captured=torch.cat(captured, dim=1),
        positions=torch.cat((torch.arange(12), torch.arange(15))).unsqueeze(0),
        documents=torch.tensor([[0] * 12 + [1] * 15]),
    )  # fmt: skip
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_later_steps_learn_through_the_earlier_ones():
    """The training-time test's own states carry gradients back to the first step."""
    target = make_target("llama")
    drafter = Eagle3.fresh(eagle3_config(), seed=0)
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    captured = target.forward(
        tokens, target.new_cache(1), capture_layers=drafter.capture_layers
    ).captured
    hidden = drafter(
        target, captured=captured, tokens=tokens, anchors=torch.tensor([[6, 12]]),
        positions=torch.arange(LENGTH).unsqueeze(0), steps=3,
    )  # fmt: skip
    hidden[:, :, 2].sum().backward()
    assert drafter.fc.weight.grad.abs().sum() > 0


def test_a_step_fed_with_the_targets_feature_is_a_chain_that_starts_there(monkeypatch):
    """Positions, keys and visibility of own states are those of true ones."""
    target, drafter = make_target("llama"), random_baseline("eagle3")
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    captured = target.forward(
        tokens, target.new_cache(1), capture_layers=drafter.capture_layers
    ).captured
    later = trained_logits(drafter, target, tokens, torch.tensor([[10, 17]]), 1, captured=captured)
    true = drafter.features(captured)[:, [9, 16]]
    forward = drafter.layer.forward
    monkeypatch.setattr(
        drafter.layer, "forward", lambda *given: forward(*given) if given[5] else true
    )
    led = trained_logits(drafter, target, tokens, torch.tensor([[9, 16]]), 2, captured=captured)
    torch.testing.assert_close(led[:, :, 1], later[:, :, 0], atol=1e-5, rtol=1e-5)
