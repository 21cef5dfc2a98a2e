"""The Markov head (as in DSpark): a low-rank bigram table corrects the base logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from domino_spec.drafter.config import MarkovHeadConfig
from domino_spec.drafter.heads.base import Embed, Head


class MarkovHead(Head):
    """correction = W2 · W1[previous token]: no hidden states, no memory of earlier tokens."""

    def __init__(
        self, config: MarkovHeadConfig, *, vocab_size: int, output_vocab_size: int
    ) -> None:
        super().__init__(config, state_size=config.emb_dim)
        self.markov_w1 = nn.Embedding(vocab_size, config.emb_dim)
        self.markov_w2 = nn.Linear(config.emb_dim, output_vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """W2, [output vocabulary, rank]."""
        return self.markov_w2.weight

    def states(self, tokens: Tensor, embed: Embed) -> Tensor:  # noqa: ARG002
        """Each token's own row of W1."""
        rows: Tensor = self.markov_w1(tokens.to(self.markov_w1.weight.device))
        return rows

    def step(self, token: Tensor, state: Tensor, embed: Embed) -> Tensor:  # noqa: ARG002
        """The token's row of W1; the state before it is forgotten."""
        return self.states(token, embed)

    def project_hidden(self, hidden: Tensor) -> Tensor:
        """Nothing: [..., hidden] -> [..., 0]."""
        return hidden[..., :0]

    def activation(self, projected: Tensor, state: Tensor) -> Tensor:  # noqa: ARG002
        """The state itself."""
        return state

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Rows of W1 of about unit length, W2 zero: the base logits stay as they are."""
        self.markov_w1.weight.normal_(0.0, self.state_size**-0.5, generator=generator)
        self.output_weight.zero_()
