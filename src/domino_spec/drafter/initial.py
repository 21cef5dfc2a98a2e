"""Weights to start training from."""

from __future__ import annotations

import torch
from torch import nn

_STD = 0.02
_INTO_THE_RESIDUAL = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def initialise_layers(module: nn.Module, generator: torch.Generator, *, layers: int) -> None:
    """Small normal matrices, smaller still where a layer adds to the residual; norms of one."""
    damped = _STD / (2 * layers) ** 0.5
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            std = damped if name.endswith(_INTO_THE_RESIDUAL) else _STD
            parameter.normal_(0.0, std, generator=generator)
