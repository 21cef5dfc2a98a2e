"""What the trained baselines share: the borrowed lm_head and a perhaps reduced vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from domino_spec.baselines.config import BaselineConfig
from domino_spec.drafter import TargetVocabulary
from domino_spec.drafter.model import check_draft_tokens

Config = TypeVar("Config", bound=BaselineConfig)


class BaselineDrafter(nn.Module, ABC, Generic[Config]):
    """A drafter that is no block drafter. Embedding and lm_head are the target's."""

    draft_tokens: Tensor | None

    def __init__(self, config: Config, draft_tokens: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size = config.draft_vocab_size
        if size is not None and draft_tokens is None:
            draft_tokens = torch.arange(size)
        if draft_tokens is not None:
            check_draft_tokens(draft_tokens, size=size, vocab_size=config.vocab_size)
        # Target id of each token of a reduced vocabulary, [draft vocabulary].
        self.register_buffer("draft_tokens", draft_tokens)

    @classmethod
    def fresh(cls, config: Config, *, seed: int, draft_tokens: Tensor | None = None) -> Self:
        """A drafter to train."""
        with torch.random.fork_rng(devices=[]):  # building draws numbers that nobody uses
            drafter = cls(config, draft_tokens)
        drafter.initialise(torch.Generator().manual_seed(seed))
        return drafter

    @abstractmethod
    def initialise(self, generator: torch.Generator) -> None:
        """Weights to start training from."""

    @property
    @abstractmethod
    def taps(self) -> Sequence[int]:
        """Points of the target that it reads."""

    @property
    def output_norm(self) -> Tensor | None:
        """The weight of the norm before the lm_head, where it has one of its own."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' type."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the drafter lives."""
        return next(self.parameters()).device

    def compute_buffers(self, device: torch.device) -> None:
        """Make again what is computed and not stored; most have nothing of the kind."""

    def embed(self, target: TargetVocabulary, tokens: Tensor) -> Tensor:
        """Target embeddings in the drafter's own type and place."""
        return target.embed(tokens).to(self.device, self.dtype)

    def logits(self, target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """What hidden states say of the next token, [..., output vocabulary]."""
        return target.logits(hidden, self.draft_tokens).to(self.device)
