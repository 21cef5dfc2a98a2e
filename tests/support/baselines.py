"""Baseline drafters with random weights, or with weights that know the bigram target."""

from __future__ import annotations

import torch

from domino_spec.drafter import Eagle3, Eagle3Config, Medusa, MedusaConfig
from tests.support.families import HIDDEN, LAYERS, VOCAB, randomise
from tests.support.pair import SIZE, successor


def medusa_config(**changes) -> MedusaConfig:
    values = {
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_target_layers": LAYERS, "num_heads": 5,
        "num_layers": 2,
    }  # fmt: skip
    return MedusaConfig(**{**values, **changes})


def eagle3_config(**changes) -> Eagle3Config:
    values = {
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_target_layers": LAYERS,
        "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "tapped_layers": (0, 2), "unrolled": 5,
    }  # fmt: skip
    return Eagle3Config(**{**values, **changes})


def random_baseline(kind: str, *, seed: int = 0, **changes) -> Medusa | Eagle3:
    """Weights, biases and norms that all make a difference."""
    drafter = (
        Medusa(medusa_config(**changes)) if kind == "medusa" else Eagle3(eagle3_config(**changes))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return randomise(drafter.eval(), 0.3, seed=seed)


def knowing_medusa(*, heads: int = 4, table: torch.Tensor | None = None) -> Medusa:
    """Head k of the bigram target's one-hot states turns a token into its k-th successor."""
    table = successor() if table is None else table
    size = len(table)
    config = MedusaConfig(hidden_size=size, vocab_size=size, num_target_layers=2, num_heads=heads)
    drafter = Medusa(config).eval()
    step = torch.zeros(size, size)
    step[table, torch.arange(size)] = 1.0
    with torch.no_grad():
        for count, head in enumerate(drafter.heads, start=1):
            block = head.blocks[0]
            block.bias.zero_()
            block.weight.copy_(20.0 * torch.linalg.matrix_power(step, count))
    return drafter


def knowing_eagle3(*, unrolled: int = 4, size: int = SIZE) -> Eagle3:
    """Hands the token it reads to the lm_head, which knows its successor.

    Each row attends to itself alone and adds its token's embedding, less the feature that it came
    with: a chain that read another token or another row's feature would name something else.
    """
    config = Eagle3Config(
        hidden_size=size, vocab_size=size, num_target_layers=2, intermediate_size=8,
        num_heads=1, num_kv_heads=1, head_dim=size, tapped_layers=(0, 1), unrolled=unrolled,
    )  # fmt: skip
    drafter = Eagle3(config).eval()
    one, none = torch.eye(size), torch.zeros(size, size)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.zero_()
        layer = drafter.layer
        layer.q_proj.weight.copy_(torch.cat((1000.0 * one, none), dim=1))
        layer.k_proj.weight.copy_(torch.cat((one, none), dim=1))
        layer.v_proj.weight.copy_(torch.cat((one, -one), dim=1) / size**0.5)
        layer.o_proj.weight.copy_(one)
    return drafter
