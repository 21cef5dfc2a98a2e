"""What every head offers: states over a prefix, and a low-rank correction made from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.drafter.config import HeadConfig

Embed = Callable[[Tensor], Tensor]
"""Tokens [...] -> the target's embeddings [..., hidden], in the head's own type and place."""


class Head(nn.Module, ABC):
    """correction = output_weight · activation(hidden, state of the prefix), without biases.

    Training asks for all states over known tokens at once (`states`), decoding reads one token
    after the other (`step`); both then go through `project_hidden` and `correction`, so that
    there is one formula. The hidden part of all slots is projected at once.
    """

    reads: ClassVar[Mapping[str, str]] = {}
    """Matrices that read the target's own states, and which: embedding, hidden."""

    def __init__(self, config: HeadConfig, *, state_size: int) -> None:
        super().__init__()
        self.prefix_len = config.pure_draft_prefix_len
        self.state_size = state_size

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """[output vocabulary, rank]."""

    @abstractmethod
    def states(self, tokens: Tensor, embed: Embed) -> Tensor:
        """State m is that after reading tokens[:, : m + 1]: [n, depth] -> [n, depth, state]."""

    @abstractmethod
    def step(self, token: Tensor, state: Tensor, embed: Embed) -> Tensor:
        """The state [batch, state] after reading one more token [batch]."""

    @abstractmethod
    def project_hidden(self, hidden: Tensor) -> Tensor:
        """The part of `activation` that depends on the hidden states alone, for any slots."""

    @abstractmethod
    def activation(self, projected: Tensor, state: Tensor) -> Tensor:
        """What the output weight is applied to, [..., rank]."""

    @abstractmethod
    def initialise(self, generator: torch.Generator) -> None:
        """Weights to start training from: random, with an output that is zero."""

    def initial_state(self, batch: int, like: Tensor) -> Tensor:
        """The zero state before the anchor is read."""
        return torch.zeros(batch, self.state_size, dtype=like.dtype, device=like.device)

    def correction(self, projected: Tensor, state: Tensor, columns: Tensor | None = None) -> Tensor:
        """What is added to the base logits: of all output tokens, or of `columns` [..., k]."""
        activation = self.activation(projected, state)
        if columns is None:
            return F.linear(activation, self.output_weight)
        return (self.output_weight[columns] @ activation.unsqueeze(-1)).squeeze(-1)
