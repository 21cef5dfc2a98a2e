"""The causal head: a GRU reads the drafted prefix, a low-rank term corrects the base logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.drafter.config import HeadConfig


class DominoHead(nn.Module):
    """correction = W2 · SiLU(W1 · [hidden ; state]), without biases.

    W1 is applied in two parts so that the hidden part of all slots is computed once and only
    the state part is computed at each step. Training and decoding both go through
    `project_hidden` and `correction`.
    """

    def __init__(self, hidden_size: int, output_vocab_size: int, config: HeadConfig) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.state_size = config.gru_hidden_dim
        self.prefix_len = config.pure_draft_prefix_len
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
    def output_weight(self) -> Tensor:
        """W2, [output vocabulary, rank]."""
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight

    def states(self, embeddings: Tensor) -> Tensor:
        """All states over known tokens [rows, n, hidden] -> [rows, n, state] (teacher forcing)."""
        states: Tensor = self.prefix_gru(embeddings)[0]
        return states

    def initial_state(self, rows: int, like: Tensor) -> Tensor:
        """The zero state before the anchor is read."""
        return torch.zeros(rows, self.state_size, dtype=like.dtype, device=like.device)

    def step(self, embedding: Tensor, state: Tensor) -> Tensor:
        """Read one token [rows, hidden]: the same recurrence as `states`, one position of it."""
        weight_input, weight_state = self.prefix_gru.all_weights[0]
        inputs = F.linear(embedding, weight_input).chunk(3, dim=-1)
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
        return F.silu(projected + F.linear(state, self._first[:, self.hidden_size :]))

    def correction(self, projected: Tensor, state: Tensor) -> Tensor:
        """What is added to the base logits, [..., output vocabulary]."""
        return F.linear(self.activation(projected, state), self.output_weight)
