"""Weights to start training from."""

from __future__ import annotations

import torch
from torch import nn

from domino_spec.drafter.backbone import Backbone

_STD = 0.02
_INTO_THE_RESIDUAL = ("o_proj.weight", "down_proj.weight")


@torch.no_grad()
def initialise_backbone(backbone: Backbone, generator: torch.Generator) -> None:
    """Small normal matrices, smaller still where a layer adds to the residual; norms of one."""
    damped = _STD / (2 * backbone.config.num_layers) ** 0.5
    for name, parameter in backbone.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            std = damped if name.endswith(_INTO_THE_RESIDUAL) else _STD
            parameter.normal_(0.0, std, generator=generator)
