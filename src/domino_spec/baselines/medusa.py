"""Medusa: a head for each of the next tokens, all from one state of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.baselines.base import BaselineDrafter
from domino_spec.baselines.config import MedusaConfig
from domino_spec.decoding import DraftChoices, Proposal
from domino_spec.decoding import Sequence as Decoded
from domino_spec.targets import Target


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


class Medusa(BaselineDrafter[MedusaConfig]):
    """Guesses the tokens behind the next one, each without knowing the others.

    The state is the one whose logits gave the anchor: the anchor itself is not read.
    """

    def __init__(self, config: MedusaConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__(config, draft_tokens)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:  # noqa: ARG002
        """Zeros: every head begins as the target's own next token."""
        for parameter in self.parameters():
            parameter.zero_()

    @property
    def taps(self) -> Sequence[int]:
        """What the lm_head reads."""
        return (self.config.num_target_layers,)

    def forward(self, states: Tensor, depth: int | None = None) -> Tensor:
        """Hidden states behind each draft: [..., hidden] -> [..., depth, hidden]."""
        states = states.to(self.device, self.dtype)
        return torch.stack([head(states) for head in self.heads[:depth]], dim=-2)


class MedusaProposer:
    """Drafts a chain: each head's choice, whatever the others chose."""

    def __init__(self, drafter: Medusa, target: Target, *, depth: int) -> None:
        self.drafter = drafter
        self.target = target
        self.taps = drafter.taps
        self.depth = depth
        self._states: Tensor | None = None

    def begin(self, rows: int) -> None:  # noqa: ARG002
        """Nothing is known yet."""
        self._states = None

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """Keep each row's last verified state, [rows, hidden]."""
        assert taps is not None
        last = torch.tensor(counts, device=taps.device) - 1
        self._states = taps[torch.arange(len(counts), device=taps.device), last]

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:
        """All heads at once."""
        assert self._states is not None
        hidden = self.drafter(self._states, depth)
        logits = self.drafter.logits(self.target, hidden)  # [rows, depth, output vocabulary]
        choices = DraftChoices(rows)
        drafts = [
            choices.tokens(index, logits[:, index], self.drafter.draft_tokens)
            for index in range(depth)
        ]
        return Proposal(torch.stack(drafts, dim=1), choices.drawn)

    def select(self, rows: Sequence[int]) -> None:
        """Drop finished rows."""
        if self._states is not None:
            self._states = self._states[list(rows)]
