"""Training-time test and decoding are one forward: the same logits of the same chains."""

import pytest
import torch

from domino_spec.baselines import Eagle3, Eagle3Proposer
from domino_spec.decoding import DraftChoices, SamplingParams, make_sampler
from tests.support.baselines import eagle3_config, random_baseline
from tests.support.families import VOCAB, make_target
from tests.support.runs import make_sequences

LENGTH = 30


def trained_logits(drafter, target, tokens, anchors, steps, **packed):
    taps = packed.pop("taps", None)
    if taps is None:
        taps = target.forward(tokens, target.new_cache(len(tokens)), taps=drafter.taps).taps
    positions = packed.pop("positions", torch.arange(tokens.shape[1]).expand_as(tokens))
    with torch.no_grad():
        hidden = drafter(
            target, taps=taps, tokens=tokens, anchors=anchors, positions=positions, steps=steps,
            **packed,
        )  # fmt: skip
        return drafter.logits(target, hidden)


@pytest.mark.parametrize("reduced", [None, 41])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_chains_of_training_are_those_of_decoding(family, reduced, monkeypatch):
    target = make_target(family)
    drafter = random_baseline("eagle3", draft_vocab_size=reduced)
    steps = 7  # more than it was configured for
    tokens = torch.randint(
        0, reduced or VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(7)
    )
    anchors = torch.tensor([[3, 9, 10, 19], [1, 2, 15, 20], [5, 6, 7, 18]])
    expected = trained_logits(drafter, target, tokens, anchors, steps)
    taps = target.forward(tokens, target.new_cache(3), taps=drafter.taps).taps

    # Decoding is led along the true tokens; what it would have chosen from is kept.
    seen: list[torch.Tensor] = []
    proposer = Eagle3Proposer(drafter, target, depth=steps)
    proposer.begin(3)
    done = [0, 0, 0]
    for step in range(anchors.shape[1]):
        counts = [int(anchors[row, step]) - done[row] for row in range(3)]
        fed = torch.zeros(3, max(counts), taps.shape[-1])
        for row, count in enumerate(counts):
            fed[row, :count] = taps[row, done[row] : done[row] + count]
        proposer.observe(fed, counts)
        done = [int(anchors[row, step]) for row in range(3)]
        prompts = [tokens[row, : done[row]].tolist() for row in range(3)]
        rows = make_sequences(prompts, SamplingParams(max_new_tokens=20))
        for row in rows:
            row.sampler = make_sampler(row, target.device)
            row.take([int(tokens[row.index, done[row.index]])])

        def follow(self, index, logits, draft_tokens, done=tuple(done)):
            seen.append(logits)
            return torch.stack([tokens[row, done[row] + 1 + index] for row in range(3)])

        monkeypatch.setattr(DraftChoices, "tokens", follow)
        seen.clear()
        with torch.no_grad():
            proposer.propose(rows, steps)
        decoded = torch.stack(seen, dim=1)
        torch.testing.assert_close(decoded, expected[:, step], atol=1e-4, rtol=1e-4)
    assert (expected[:, :, 0] - expected[:, :, 1]).abs().max() > 0.1


def test_a_chain_sees_neither_other_chains_nor_the_features_behind_its_start():
    target, drafter = make_target("llama"), random_baseline("eagle3")
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    taps = target.forward(tokens, target.new_cache(1), taps=drafter.taps).taps
    one = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, taps=taps)
    many = trained_logits(drafter, target, tokens, torch.tensor([[4, 8, 9, 10, 22]]), 5, taps=taps)
    torch.testing.assert_close(many[:, 2], one[:, 0], atol=1e-5, rtol=1e-5)
    spoiled = taps.clone()
    spoiled[:, 9:] += 3.0  # the anchor's own features and all behind: unknown when it drafts
    again = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, taps=spoiled)
    torch.testing.assert_close(again, one, atol=1e-5, rtol=1e-5)
    spoiled[:, 8] += 3.0
    other = trained_logits(drafter, target, tokens, torch.tensor([[9]]), 5, taps=spoiled)
    assert (other - one).abs().max() > 0.01


def test_packed_documents_do_not_see_each_other():
    target, drafter = make_target("llama"), random_baseline("eagle3")
    first = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    second = torch.randint(0, VOCAB, (1, 15), generator=torch.Generator().manual_seed(2))
    taps = [target.forward(t, target.new_cache(1), taps=drafter.taps).taps for t in (first, second)]
    alone = trained_logits(drafter, target, second, torch.tensor([[2, 6]]), 4, taps=taps[1])
    packed = trained_logits(
        drafter, target, torch.cat((first, second), dim=1), torch.tensor([[14, 18]]), 4,
        taps=torch.cat(taps, dim=1),
        positions=torch.cat((torch.arange(12), torch.arange(15))).unsqueeze(0),
        documents=torch.tensor([[0] * 12 + [1] * 15]),
    )  # fmt: skip
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_later_steps_learn_through_the_earlier_ones():
    """The training-time test's own states carry gradients back to the first step."""
    target = make_target("llama")
    drafter = Eagle3.fresh(eagle3_config(), seed=0)
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    taps = target.forward(tokens, target.new_cache(1), taps=drafter.taps).taps
    hidden = drafter(
        target, taps=taps, tokens=tokens, anchors=torch.tensor([[6, 12]]),
        positions=torch.arange(LENGTH).unsqueeze(0), steps=3,
    )  # fmt: skip
    hidden[:, :, 2].sum().backward()
    assert drafter.fc.weight.grad.abs().sum() > 0


def test_a_step_fed_with_the_targets_feature_is_a_chain_that_starts_there(monkeypatch):
    """Positions, keys and visibility of own states are those of true ones."""
    target, drafter = make_target("llama"), random_baseline("eagle3")
    tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    taps = target.forward(tokens, target.new_cache(1), taps=drafter.taps).taps
    later = trained_logits(drafter, target, tokens, torch.tensor([[10, 17]]), 1, taps=taps)
    true = drafter.features(taps)[:, [9, 16]]
    forward = drafter.layer.forward
    monkeypatch.setattr(
        drafter.layer, "forward", lambda *given: forward(*given) if given[5] else true
    )
    led = trained_logits(drafter, target, tokens, torch.tensor([[9, 16]]), 2, taps=taps)
    torch.testing.assert_close(led[:, :, 1], later[:, :, 0], atol=1e-5, rtol=1e-5)
