"""The Domino head: a GRU reads the drafted prefix, a low-rank term corrects the base logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.drafter.config import DominoHeadConfig
from domino_spec.drafter.heads.base import Embed, Head

_INITIAL_STD = 0.02


class DominoHead(Head):
    """correction = W2 · SiLU(W1 · [hidden ; state]).

    W1 is applied in two parts so that the hidden part of all slots is computed once and only
    the state part is computed at each step.
    """

    reads: ClassVar[Mapping[str, str]] = {
        "prefix_gru.weight_ih_l0": "embedding",
        "embed_proj.0.weight": "hidden",
    }

    def __init__(
        self, config: DominoHeadConfig, *, hidden_size: int, output_vocab_size: int
    ) -> None:
        super().__init__(config, state_size=config.gru_hidden_dim)
        self.hidden_size = hidden_size
        self.prefix_gru = nn.GRU(hidden_size, config.gru_hidden_dim, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, output_vocab_size, bias=False),
        )

    @property
    def _first(self) -> Tensor:
        weight = self.embed_proj[0].weight
        assert isinstance(weight, Tensor)
        return weight  # [rank, hidden + state]

    @property
    def state_weight(self) -> Tensor:
        """W1's state part, [rank, state]: a view with the whole matrix's rows."""
        return self._first[:, self.hidden_size :]

    @property
    def output_weight(self) -> Tensor:
        """W2, [output vocabulary, rank]."""
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight

    def states(self, tokens: Tensor, embed: Embed) -> Tensor:
        """The GRU over all tokens in parallel (teacher forcing)."""
        states: Tensor = self.prefix_gru(embed(tokens))[0]
        return states

    def step(self, token: Tensor, state: Tensor, embed: Embed) -> Tensor:
        """The same recurrence as `states`, one position of it."""
        weight_input, weight_state = self.prefix_gru.all_weights[0]
        inputs = F.linear(embed(token), weight_input).chunk(3, dim=-1)
        carried = F.linear(state, weight_state).chunk(3, dim=-1)
        reset = torch.sigmoid(inputs[0] + carried[0])
        update = torch.sigmoid(inputs[1] + carried[1])
        new = torch.tanh(inputs[2] + reset * carried[2])
        return new + update * (state - new)

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """W1's hidden part for any number of slots: [..., hidden] -> [..., rank]."""
        return F.linear(hidden, self._first[:, : self.hidden_size])

    def activation(self, projected: Tensor, state: Tensor) -> Tensor:
        """SiLU(W1 · [hidden ; state]) from the hoisted hidden part, [..., rank]."""
        return F.silu(projected + F.linear(state, self.state_weight))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """The GRU as PyTorch's own, W1 small, W2 zero: the base logits stay as they are."""
        bound = self.state_size**-0.5
        for weight in self.prefix_gru.parameters():
            weight.uniform_(-bound, bound, generator=generator)
        self._first.normal_(0.0, _INITIAL_STD, generator=generator)
        self.output_weight.zero_()
