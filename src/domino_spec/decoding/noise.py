"""Noise that belongs to a place: a Gumbel number from seed, position and token alone.

argmax(logits / temperature + noise) draws from the softmax. The noise is a hash, with no state to
keep: a position's draw is the same in whatever batch, order or block it is made. So a seed gives
the same text with a drafter and without, and drafts drawn with the same noise as the target's own
choice agree with it about as often as the two distributions do.

The engine's kernels (`engine.kernels.gumbel`) compute the same integers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

WORD: Final = 0xFFFFFFFF
STARTS: Final = (0x9E3779B9, 0x7F4A7C15)
"""Where the two words of a key begin: digits of the golden ratio."""
MIXERS: Final = (0x85EBCA6B, 0xC2B2AE35)
"""Odd factors after which every bit of a word depends on all of them (MurmurHash3's)."""


def hashed(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 bits for each (seed, position, token), all int64 and broadcast; int64 in 0 … 2^32 - 1."""
    first, second = (_key(start, seeds, positions) for start in STARTS)
    return _mixed(_mixed((tokens + first) & WORD) ^ second)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel numbers in float32: -log(-log(1 - u)), u as fine near 0 as the bits allow.

    There lies the noise that wins, and float32 cannot tell 1 - u from 1: hence the series.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -torch.where(u < 2.0**-6, series, -torch.log(1 - u)).log()


def noised(
    logits: Tensor,  # [batch, k]
    tokens: Tensor,  # [batch, k] or [1, k]: the target's ids
    temperature: Tensor,  # [batch]
    seeds: Tensor,  # [batch]
    positions: Tensor,  # [batch]
) -> Tensor:
    """What to take the argmax of, [batch, k] float32; one of temperature 0 stays greedy."""
    heat = temperature.float().unsqueeze(1)
    noise = gumbel(hashed(seeds.unsqueeze(1), positions.unsqueeze(1), tokens))
    drawn = logits.float() / torch.where(heat > 0, heat, 1.0) + noise
    return torch.where(heat > 0, drawn, logits.float())


def _key(start: int, seeds: Tensor, positions: Tensor) -> Tensor:
    key = torch.full_like(seeds, start)
    for number in (seeds, positions):
        for word in (number & WORD, (number >> 32) & WORD):
            key = _mixed(((key ^ word) + start) & WORD)
    return key


def _mixed(word: Tensor) -> Tensor:
    # Products leave int64's range, but the 32 bits kept are right all the same.
    word = ((word ^ (word >> 16)) * MIXERS[0]) & WORD
    word = ((word ^ (word >> 13)) * MIXERS[1]) & WORD
    return word ^ (word >> 16)
