"""Training and decoding agree: `propose` over slots scores drafts as the trained model does."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from domino_spec.decoding.drafter import SequenceSampler
from domino_spec.drafter.masks import ALL_CONTEXT, Window
from domino_spec.drafters import BlockDrafter, block, drafter_of
from domino_spec.engine.models.base import draft_shape
from tests.support.baselines import random_baseline
from tests.support.families import VOCAB, drafter_config, make_target, markov_head, random_drafter

CASES = {
    "shift": {"shift": True},
    "no-shift": {"shift": False},
    "shift, no prefix": {"shift": True, "prefix": 0},
    "no-shift, long prefix": {"shift": False, "prefix": 3},
    "dflash": {"shift": False, "head": False},
    "dflash shifted": {"shift": True, "head": False},
    "sliding": {
        "shift": True,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 5,
    },
    "sliding causal": {
        "shift": False,
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 4,
        "causal_window": True,
    },
    "reduced vocabulary": {"shift": True, "draft_vocab_size": 41},
    "markov": {"shift": True, "head": markov_head()},
    "markov, no-shift, reduced": {
        "shift": False,
        "head": markov_head(prefix=1),
        "draft_vocab_size": 41,
    },
}


ROWS, LENGTH = 3, 40
# Anchors differ from sequence to sequence, so that lengths in the cache do.
ANCHORS = torch.tensor([[3, 9, 10, 21, 31], [1, 2, 17, 25, 30], [5, 6, 7, 8, 29]])


class Led(SequenceSampler):
    """Follows the true tokens and keeps the logits it would have chosen from."""

    def __init__(self, truth):
        self._truth, self.seen = truth, []

    def choose_drafts(self, logits, starts, tokens=None):
        for index in range(logits.shape[1]):
            self.column(len(self.seen), logits[:, index], None)
        first = len(self.seen) - logits.shape[1]
        return torch.stack([row[first : len(self.seen)] for row in self._truth])

    def column(self, index, logits, tokens):
        self.seen.append(logits)
        return torch.stack([row[index] for row in self._truth])


def proposed_logits(drafter, target, tokens, captured, depth):
    """What `propose` chose from at each of ANCHORS, led along the true tokens, with junk between.

    After every anchor the cache is told of a whole block, most of which is then written over.
    """
    drafter = drafter.bind(target)
    drafter.resize(slots=ROWS + 1, capacity=LENGTH + drafter.lookahead + depth)
    slots = torch.tensor([2, 0, 3])
    seen = torch.zeros(ROWS, dtype=torch.long)
    found = []
    with torch.no_grad():
        for anchors in ANCHORS.T:
            count = int((anchors - seen).max())
            places = (seen.unsqueeze(1) + torch.arange(count)).clamp(max=LENGTH - 1)
            fed = captured.gather(1, places.unsqueeze(2).expand(-1, -1, captured.shape[2]))
            known = tokens.gather(1, places)
            drafter.update_cache(fed.flatten(0, 1), known, slots=slots, starts=seen)
            seen = anchors.clone()
            truth = [tokens[row, seen[row] + 1 :] for row in range(ROWS)]
            sampler = Led(truth)
            drafter.propose(
                tokens.gather(1, seen.unsqueeze(1)).squeeze(1),
                slots=slots, starts=seen, depth=depth, sampler=sampler,
            )  # fmt: skip
            found.append(torch.stack(sampler.seen, dim=1))
    return torch.stack(found, dim=1)  # [rows, anchors, depth, output vocabulary]


def text(vocabulary):
    """All tokens can be drafted, so that drafts can be led along the truth."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, vocabulary, (ROWS, LENGTH), generator=generator)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("case", CASES)
def test_block_drafters(case, family):
    target = make_target(family)
    config = drafter_config(**CASES[case])
    model, tokens = random_drafter(config), text(config.output_vocab_size)
    captured = target.forward(
        tokens, target.new_cache(ROWS), capture_layers=config.target_layer_ids
    ).captured
    with torch.no_grad():
        base, final = model(target, captured=captured, tokens=tokens, anchors=ANCHORS)
    found = proposed_logits(drafter_of(model), target, tokens, captured, config.max_depth)
    torch.testing.assert_close(found, final, atol=1e-4, rtol=1e-4)
    if config.head is not None:
        assert (base - final).abs().max() > 0.1, "the head does nothing: the test is blind"


@pytest.mark.parametrize("window", [Window(8, 3), ALL_CONTEXT], ids=["sinks", "all"])
@pytest.mark.parametrize("case", ["shift", "sliding", "sliding causal"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_window_replaces_those_of_the_layers(case, batch_invariant, window, monkeypatch):
    """What `simulate` sets on the backbone is what a drafter with a window reads."""
    target = make_target("qwen3")
    config = drafter_config(**CASES[case])
    model, tokens = random_drafter(config), text(config.output_vocab_size)
    captured = target.forward(
        tokens, target.new_cache(ROWS), capture_layers=config.target_layer_ids
    ).captured
    given = {"captured": captured, "tokens": tokens, "anchors": ANCHORS}
    with torch.no_grad():
        own = model(target, **given)[1]
        monkeypatch.setattr(model.backbone, "draft_window", ALL_CONTEXT)
        whole = model(target, **given)[1]
        monkeypatch.setattr(model.backbone, "draft_window", window)
        expected = model(target, **given)[1]
    drafter = BlockDrafter(model, window=window)
    if batch_invariant:  # as quantised layers attend
        alone = partial(replace, batch_invariant=True)
        monkeypatch.setattr(block, "draft_shape", lambda *given: alone(draft_shape(*given)))
        monkeypatch.setattr(block, "stack_of", lambda *_: None)  # of quantised weights alone
    found = proposed_logits(drafter, target, tokens, captured, config.max_depth)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    changed = (whole - expected).abs().amax(dim=(2, 3)) > 1e-3  # [rows, anchors]
    assert torch.equal(changed, (ANCHORS + config.block_size > 8 + 3) & (window != ALL_CONTEXT))
    assert torch.equal(own, whole) == (case == "shift")
    reopened = drafter_of(model, **drafter.context_settings)
    assert reopened.window == window


@pytest.mark.parametrize("reduced", [None, 41])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_eagle3(family, reduced):
    target, model = make_target(family), random_baseline("eagle3", draft_vocab_size=reduced)
    steps, tokens = 7, text(reduced or VOCAB)  # more than it was configured for
    captured = target.forward(
        tokens, target.new_cache(ROWS), capture_layers=model.capture_layers
    ).captured
    positions = torch.arange(LENGTH).expand_as(tokens)
    with torch.no_grad():
        hidden = model(
            target,
            captured=captured,
            tokens=tokens,
            anchors=ANCHORS,
            positions=positions,
            steps=steps,
        )
        expected = model.base_logits(target, hidden)
    found = proposed_logits(drafter_of(model), target, tokens, captured, steps)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (expected[:, :, 0] - expected[:, :, 1]).abs().max() > 0.1


@pytest.mark.parametrize("reduced", [None, 41])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_medusa(family, reduced):
    target, model = make_target(family), random_baseline("medusa", draft_vocab_size=reduced)
    tokens = text(reduced or VOCAB)
    states = target.forward(
        tokens, target.new_cache(ROWS), capture_layers=model.capture_layers
    ).captured
    with torch.no_grad():
        before = states[torch.arange(ROWS).unsqueeze(1), ANCHORS - 1]
        expected = model.base_logits(target, model(before))
    found = proposed_logits(drafter_of(model), target, tokens, states, 5)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_packed_documents_do_not_see_each_other():
    target = make_target("llama")
    drafter = random_drafter(drafter_config(shift=True))
    first = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    second = torch.randint(0, VOCAB, (1, 15), generator=torch.Generator().manual_seed(2))
    layers = drafter.config.target_layer_ids
    captured = [
        target.forward(t, target.new_cache(1), capture_layers=layers).captured
        for t in (first, second)
    ]
    with torch.no_grad():
        alone = drafter(
            target, captured=captured[1], tokens=second, anchors=torch.tensor([[2, 6]])
        )[1]
        packed = drafter(
            target,
            captured=torch.cat(captured, dim=1),
            tokens=torch.cat((first, second), dim=1),
            anchors=torch.tensor([[14, 18]]),
            positions=torch.cat((torch.arange(12), torch.arange(15))).unsqueeze(0),
            documents=torch.tensor([[0] * 12 + [1] * 15]),
        )[1]
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)
