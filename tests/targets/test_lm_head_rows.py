"""Rows of a target's lm_head, for checkpoints that repeat them."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

from domino_spec.errors import TargetError
from domino_spec.targets import Target

TOKENS = torch.tensor([5, 2, 9])


@pytest.fixture
def target() -> Target:
    config = tf.LlamaConfig(
        vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return Target(tf.LlamaForCausalLM(config).eval(), name="tiny")


def test_the_rows_give_the_logits(target: Target) -> None:
    rows = target.lm_head_rows(TOKENS)
    assert torch.equal(rows, target.lm_head.weight[TOKENS])
    assert not rows.requires_grad
    hidden = torch.randn(3, 8)
    assert torch.equal(hidden @ rows.T, target.logits(hidden, TOKENS))


class Quantised(nn.Linear):
    """Stands for a module whose weights are not what it multiplies with."""


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("logit_scale", 0.5, "logits multiplied by 0.5"),
        ("logit_softcap", 30.0, r"logits capped at 30\.0"),
        ("lm_head", nn.Linear(8, 12, bias=True), "an lm_head with a bias"),
        ("lm_head", Quantised(8, 12, bias=False), "a quantised, adapted or off-loaded lm_head"),
    ],
)
def test_what_rows_cannot_hold_is_refused(
    name: str, value: object, named: str, target: Target
) -> None:
    setattr(target, name, value)
    with pytest.raises(TargetError, match=f"tiny has {named}, which rows"):
        target.lm_head_rows(TOKENS)
