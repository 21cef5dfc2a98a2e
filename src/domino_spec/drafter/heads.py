"""Heads: what reads the drafted prefix and corrects the backbone's logits by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.drafter.config import DominoHeadConfig, HeadConfig, MarkovHeadConfig
from domino_spec.errors import ConfigError

_INITIAL_STD = 0.02

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

    def matrices(self) -> dict[str, Tensor]:
        """By what they read: `quantization.drafts.MATRICES`, without the target's."""
        read_token, read_state = self.prefix_gru.all_weights[0]
        return {
            "input": read_token,
            "carried": read_state,
            "hidden": self._first[:, : self.hidden_size],
            "prefix": self.state_weight,
            "output": self.output_weight,
        }

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


class MarkovHead(Head):
    """correction = W2 · W1[previous token], as in DSpark: no hidden states, no earlier tokens."""

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


def build_head(
    config: HeadConfig, *, hidden_size: int, vocab_size: int, output_vocab_size: int
) -> Head:
    """The module of a configuration."""
    match config:
        case DominoHeadConfig():
            return DominoHead(config, hidden_size=hidden_size, output_vocab_size=output_vocab_size)
        case MarkovHeadConfig():
            return MarkovHead(config, vocab_size=vocab_size, output_vocab_size=output_vocab_size)
    raise ConfigError(f"no head is known for {type(config).__name__}; expected Domino or Markov.")
