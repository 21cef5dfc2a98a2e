"""Every head: one step at a time or all at once, some columns or all, fresh weights, kinds."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from domino_spec.drafter import (
    DominoHeadConfig,
    DraftModel,
    HeadConfig,
    MarkovHeadConfig,
)
from domino_spec.drafter.heads import DominoHead, MarkovHead, build_head
from domino_spec.drafter.rollout import rollout
from domino_spec.errors import ConfigError
from tests.support.families import (
    VOCAB,
    drafter_config,
    make_target,
    markov_head,
    random_drafter,
)

HEADS = {
    "domino": DominoHeadConfig(gru_hidden_dim=16, emb_dim=8, pure_draft_prefix_len=1),
    "markov": markov_head(),
}
KINDS = pytest.mark.parametrize("kind", HEADS)


def some(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_tokens(*shape, below=VOCAB, seed=2):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


@KINDS
@torch.no_grad()
def test_one_step_at_a_time_equals_all_at_once(kind):
    drafter = random_drafter(drafter_config(head=HEADS[kind]))
    embed = partial(drafter.embed, make_target("llama"))
    tokens = some_tokens(5, 9)
    parallel = drafter.head.states(tokens, embed)
    state = drafter.head.initial_state(5, parallel)
    for index in range(9):
        state = drafter.head.step(tokens[:, index], state, embed)
        torch.testing.assert_close(state, parallel[:, index], atol=1e-5, rtol=1e-5)
    assert state.shape == (5, drafter.head.state_size)


@KINDS
@torch.no_grad()
def test_some_columns_are_those_of_the_whole_correction(kind):
    head = random_drafter(drafter_config(head=HEADS[kind])).head
    projected = head.project_hidden(some(3, 4, 32))
    state = some(3, 4, head.state_size, seed=3)
    whole = head.correction(projected, state)
    assert whole.shape == (3, 4, VOCAB)
    columns = some_tokens(3, 4, 6)
    found = head.correction(projected, state, columns)
    torch.testing.assert_close(found, whole.gather(-1, columns), atol=1e-5, rtol=1e-5)
    assert whole.abs().max() > 0.1


@torch.no_grad()
def test_the_markov_correction_is_a_bigram_table():
    drafter = random_drafter(drafter_config(head=markov_head()))
    head = drafter.head
    table = head.markov_w1.weight @ head.markov_w2.weight.T  # [previous, next]
    tokens = some_tokens(4, 5)
    states = head.states(tokens, lambda _: pytest.fail("no embeddings are needed"))
    found = head.correction(head.project_hidden(some(4, 5, 32)), states)
    torch.testing.assert_close(found, table[tokens], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("reduced", [None, 41])
@pytest.mark.parametrize("candidates", [None, 6])
@KINDS
@torch.no_grad()
def test_a_rollout_equals_the_forward_over_its_own_drafts(kind, candidates, reduced, prefix):
    """Drafting from an anchor, then training on the text that was drafted, gives the drafts."""
    target = make_target("qwen3")
    head = replace(HEADS[kind], pure_draft_prefix_len=prefix)
    drafter = random_drafter(drafter_config(head=head, draft_vocab_size=reduced))
    config = drafter.config
    if reduced:
        drafter.draft_tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[
            :reduced
        ]
    anchor, rows = 6, 3
    tokens = some_tokens(rows, anchor + 1 + config.max_depth)
    captured = some(rows, tokens.shape[1], 2 * 32)
    positions = torch.arange(tokens.shape[1]).expand(rows, -1)
    hidden = drafter.draft_hidden(
        target,
        anchor_tokens=tokens[:, anchor : anchor + 1],
        anchors=torch.full((rows, 1), anchor),
        context=drafter.context(captured, positions),
        context_positions=positions,
    )
    drafts = rollout(
        drafter,
        target,
        hidden=hidden[:, 0],
        anchor_tokens=tokens[:, anchor],
        candidates=candidates,
    )
    tokens[:, anchor + 1 :] = drafts
    base, final = drafter(
        target, captured=captured, tokens=tokens, anchors=torch.full((rows, 1), anchor)
    )
    if candidates is not None:
        best = base.topk(candidates, dim=-1).indices
        final = torch.full_like(final, -torch.inf).scatter(-1, best, final.gather(-1, best))
    columns = final[:, 0].argmax(-1)
    expected = columns if drafter.draft_tokens is None else drafter.draft_tokens[columns]
    assert drafts.tolist() == expected.tolist()
    alone = base[:, 0].argmax(-1)
    alone = alone if drafter.draft_tokens is None else drafter.draft_tokens[alone]
    assert drafts.tolist() != alone.tolist(), "the head changes nothing: the test is blind"
    assert drafts[:, :prefix].tolist() == alone[:, :prefix].tolist()


# Fresh weights --------------------------------------------------------------------------------


@KINDS
@torch.no_grad()
def test_a_fresh_head_leaves_the_base_logits_and_can_learn(kind):
    target = make_target("llama")
    drafter = DraftModel.fresh(drafter_config(head=HEADS[kind]), seed=1)
    assert drafter.training
    tokens, captured = some_tokens(2, 20), some(2, 20, 2 * 32)
    with torch.enable_grad():
        base, final = drafter(
            target, captured=captured, tokens=tokens, anchors=torch.tensor([[3], [8]])
        )
        assert torch.equal(base, final)
        final.square().mean().backward()
    assert drafter.head.output_weight.grad.abs().max() > 0
    assert drafter.backbone.fc.weight.grad.abs().max() > 0


@KINDS
def test_fresh_weights_depend_on_the_seed_alone(kind):
    config = drafter_config(head=HEADS[kind])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = DraftModel.fresh(config, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = DraftModel.fresh(config, seed=5), DraftModel.fresh(config, seed=6)
    assert all(torch.equal(first[name], tensor) for name, tensor in again.state_dict().items())
    assert not torch.equal(first["backbone.fc.weight"], other.backbone.fc.weight)


def test_fresh_weights_are_of_the_intended_size():
    config = drafter_config(hidden_size=64, head_dim=16, num_layers=8, layer_types=())
    drafter = DraftModel.fresh(config, seed=0)
    layer = drafter.backbone.layers[3]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for damped in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert damped.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert bool((drafter.backbone.norm.weight == 1).all())
    assert drafter.head.prefix_gru.weight_hh_l0.abs().max().item() == pytest.approx(0.25, rel=0.05)
    assert not drafter.head.output_weight.any()


def test_fresh_weights_with_a_reduced_vocabulary():
    tokens = torch.tensor([9, 4, 77])
    drafter = DraftModel.fresh(
        drafter_config(head=markov_head(), draft_vocab_size=3), seed=0, draft_tokens=tokens
    )
    assert drafter.draft_tokens.tolist() == [9, 4, 77]
    assert drafter.head.markov_w1.weight.shape == (VOCAB, 8)
    assert drafter.head.output_weight.shape == (3, 8)


# Kinds ----------------------------------------------------------------------------------------


def test_the_configuration_decides_the_module():
    sizes = {"hidden_size": 32, "vocab_size": 50, "output_vocab_size": 20}
    assert isinstance(build_head(HEADS["domino"], **sizes), DominoHead)
    assert isinstance(build_head(HEADS["markov"], **sizes), MarkovHead)


@KINDS
def test_plain_values_name_the_kind(kind):
    assert drafter_config(head=HEADS[kind]).to_dict()["head"]["kind"] == kind


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("markov", {"emb_dim": 0}, "emb_dim is 0"),
        ("domino", {"gru_hidden_dim": -1}, "gru_hidden_dim is -1"),
        ("markov", {"pure_draft_prefix_len": -1}, "prefix_len is -1"),
        ("markov", {"pure_draft_prefix_len": 1.0}, "prefix_len is 1.0"),
    ],
)
def test_a_wrong_head_is_named(kind, changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(HEADS[kind], **changes)


def test_the_base_is_no_head():
    with pytest.raises(TypeError):
        HeadConfig(emb_dim=4)
    assert MarkovHeadConfig(emb_dim=4).pure_draft_prefix_len == 0
