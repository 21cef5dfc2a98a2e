"""Medusa: a head for each of the next tokens, all from one state of the target."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.drafter.config import MedusaConfig
from domino_spec.drafter.model import DraftModule


class MedusaHead(nn.Module):
    """Residual blocks x + SiLU(W x + b); a fresh head leaves the state as it is."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.num_layers))

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = states + F.silu(block(states))
        return states


class Medusa(DraftModule):
    """Predicts the tokens after the next one, each without knowing the others.

    The state is the one whose logits gave the anchor: the anchor itself is not read.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:  # noqa: ARG002
        """Zeros: every head begins as the target's own next token."""
        for parameter in self.parameters():
            parameter.zero_()

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What the lm_head reads."""
        return (self.config.num_target_layers,)

    def forward(self, states: Tensor, depth: int | None = None) -> Tensor:
        """Hidden states of each draft: [..., hidden] -> [..., depth, hidden]."""
        states = states.to(self.device, self.dtype)
        return torch.stack([head(states) for head in self.heads[:depth]], dim=-2)
