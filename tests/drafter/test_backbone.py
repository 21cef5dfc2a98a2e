"""The backbone against the method spelled out position by position."""

import math

import pytest
import torch

from domino_spec.drafter.masks import BlockLayout, Window, dense_mask
from tests.support.families import VOCAB, drafter_config, make_target, random_drafter


def rms(x, norm):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight


def rope(x, position, head_dim, theta=10000.0):
    half = head_dim // 2
    angle = position / theta ** (torch.arange(half) * 2 / head_dim)
    first, second = x[:half], x[half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
    )


def spelled_out_hidden(drafter, captured, embeddings, anchor):
    """One block after one context, with no cache, no batch and no mask: plain loops."""
    config, net = drafter.config, drafter.backbone
    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    features = [rms(net.fc(states), net.hidden_norm) for states in captured[:anchor]]
    states = list(embeddings)
    for layer in net.layers:
        attention = layer.self_attn
        normed = [rms(s, layer.input_layernorm) for s in states]
        # Context features skip the input norm; the same projections serve both parts.
        sources = [(f, i) for i, f in enumerate(features)]
        sources += [(n, anchor + i) for i, n in enumerate(normed)]
        new_states = []
        for slot, state in enumerate(states):
            heads = []
            query = attention.q_proj(normed[slot]).view(-1, dim)
            for head in range(config.num_heads):
                q = rope(rms(query[head], attention.q_norm), anchor + slot, dim)
                scores, values = [], []
                for source, position in sources:
                    key = attention.k_proj(source).view(-1, dim)[head // group]
                    value = attention.v_proj(source).view(-1, dim)[head // group]
                    scores.append(q @ rope(rms(key, attention.k_norm), position, dim))
                    values.append(value)
                weights = torch.stack(scores).div(math.sqrt(dim)).softmax(0)
                heads.append(weights @ torch.stack(values))
            state = state + attention.o_proj(torch.cat(heads))
            inner = rms(state, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(layer.mlp.gate_proj(inner))
            new_states.append(state + layer.mlp.down_proj(gate * layer.mlp.up_proj(inner)))
        states = new_states
    return torch.stack([rms(s, net.norm) for s in states])


@pytest.mark.parametrize("shift", [True, False])
def test_backbone_computes_the_method(shift):
    target = make_target("llama")
    config = drafter_config(shift=shift)
    drafter = random_drafter(config)
    tokens = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(5))
    anchor = 6
    with torch.no_grad():
        captured = target.forward(
            tokens, target.new_cache(1), capture_layers=config.target_layer_ids
        ).captured
        block = torch.full((config.block_size,), config.mask_token_id)
        block[0] = tokens[0, anchor]
        expected = spelled_out_hidden(drafter, captured[0], target.embed(block), anchor)
        found = drafter.draft_hidden(
            target,
            anchor_tokens=tokens[:, anchor : anchor + 1],
            anchors=torch.tensor([[anchor]]),
            context=drafter.context(captured, torch.arange(9).unsqueeze(0)),
            context_positions=torch.arange(9).unsqueeze(0),
        )
    assert found.shape == (1, 1, config.max_depth, config.hidden_size)
    torch.testing.assert_close(found[0, 0], expected[config.first_slot :], atol=1e-4, rtol=1e-4)


def test_mask_hides_the_anchors_own_state_and_other_blocks():
    layout = BlockLayout(
        anchors=torch.tensor([[2, 4]]),
        block_size=3,
        context_positions=torch.arange(6).unsqueeze(0),
    )
    mask = dense_mask(layout)
    assert mask.shape == (1, 1, 6, 12)
    context, block = mask[0, 0, :, :6], mask[0, 0, :, 6:]
    for slot in range(3):
        assert context[slot].tolist() == [True, True, False, False, False, False]
        assert context[3 + slot].tolist() == [True] * 4 + [False] * 2
        assert block[slot].tolist() == [True] * 3 + [False] * 3
        assert block[3 + slot].tolist() == [False] * 3 + [True] * 3


def test_window_limits_by_distance_and_may_be_causal_inside_the_block():
    layout = BlockLayout(
        anchors=torch.tensor([[5]]),
        block_size=4,
        context_positions=torch.arange(5).unsqueeze(0),
    )
    both = dense_mask(layout, window=Window(3))[0, 0]
    assert both[0].tolist() == [False] * 3 + [True] * 2 + [True, True, True, False]
    assert both[3].tolist() == [False] * 5 + [False, True, True, True]
    causal = dense_mask(layout, window=Window(3), causal=True)[0, 0]
    assert causal[0].tolist() == [False] * 3 + [True] * 2 + [True, False, False, False]
    assert causal[3].tolist() == [False] * 5 + [False, True, True, True]
    sinks = dense_mask(layout, window=Window(4, 1))[0, 0]
    assert sinks[0].tolist() == [True, False, True, True, True] + [True] * 4
    assert sinks[3].tolist() == [True] + [False] * 4 + [True] * 4


def test_half_precision_keeps_exact_frequencies():
    drafter = random_drafter()
    before = drafter.backbone.rotary.inv_freq.clone()
    drafter = drafter.to(torch.bfloat16)
    assert drafter.dtype == torch.bfloat16
    assert torch.equal(drafter.backbone.rotary.inv_freq, before)
