"""What a token pays for having been generated before: presence and frequency penalties."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


def less_repeated(
    scores: Tensor,  # [batch, vocabulary] float32
    counts: Tensor,  # [batch, vocabulary] float32: how often each token was generated
    *,
    presence: float | Tensor,
    frequency: float | Tensor,
) -> Tensor:
    """Scores less `frequency` for each time, and less `presence` for having come at all."""
    return scores - (frequency * counts + presence * (counts > 0).to(scores.dtype))


class GeneratedPenalty(LogitsProcessor):  # type: ignore[misc]
    """Presence and frequency penalties as a Transformers processor. The prompt costs nothing."""

    def __init__(self, *, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence = presence
        self.frequency = frequency
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Penalise what comes after the prompt in `input_ids` [batch, length]."""
        generated = input_ids[:, self.prompt_length :]
        once = torch.ones_like(generated, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, generated, once)
        return less_repeated(scores, counts, presence=self.presence, frequency=self.frequency)
