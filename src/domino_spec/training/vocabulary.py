"""The loss's softmax over a part of a large vocabulary, drawn anew at every step.

Much of a step's time may go to logits of tokens that hardly ever occur. A step's softmax is over
its labels, the tokens that answers use most and a few others at random, each of which stands for
as many as it was drawn from: its exponential counts so many times, which on average gives the sum
over all. What a drafter may propose stays the whole vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_AT_RANDOM = 1 / 4  # of the tokens in a softmax


class DrawnTokens(NamedTuple):
    """The tokens of one step's softmax."""

    tokens: Tensor  # [tokens], ascending
    offsets: Tensor  # [tokens]: log of how many a token stands for, added to its logits


class TokenDraw:
    """Draws the tokens of a step."""

    def __init__(self, counts: Tensor, size: int) -> None:
        """`counts` [vocabulary]: how often answers use each token; `size` tokens a step."""
        self._by_use = counts.argsort(descending=True, stable=True)
        self._random = max(1, round(size * _AT_RANDOM))
        self._chosen = size - self._random

    def __call__(self, labels: Tensor, seed: int) -> DrawnTokens:
        """The same for the same labels and seed; of too many labels those used most are there."""
        is_label = torch.zeros(len(self._by_use), dtype=torch.bool)
        is_label[labels] = True
        theirs = is_label[self._by_use]
        chosen = torch.cat((self._by_use[theirs], self._by_use[~theirs]))
        chosen, rest = chosen[: self._chosen], chosen[self._chosen :]
        generator = torch.Generator().manual_seed(seed)
        drawn = rest[torch.randperm(len(rest), generator=generator)[: self._random]]
        tokens, order = torch.cat((chosen, drawn)).sort()
        offsets = torch.zeros(len(tokens))
        offsets[self._chosen :] = math.log(len(rest) / len(drawn))
        return DrawnTokens(tokens, offsets[order])
