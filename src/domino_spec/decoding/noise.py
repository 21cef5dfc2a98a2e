"""Noise that belongs to a place: a Gumbel number from seed, position and token alone.

argmax(logits / temperature + noise) draws from the softmax. The noise is a hash, with no state to
keep: a position's draw is the same in whatever batch, order or block it is made. So a seed gives
the same text with a drafter and without, and drafts drawn with the same noise as the target's own
choice agree with it about as often as the two distributions do.

The engine's kernels (`engine.kernels.gumbel`) compute the same integers.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

WORD: Final = 0xFFFFFFFF
STARTS: Final = (0x9E3779B9, 0x7F4A7C15)
"""Where the two words of a key begin: digits of the golden ratio."""
MIXERS: Final = (0x85EBCA6B, 0xC2B2AE35)
"""Odd factors after which every bit of a word depends on all of them (MurmurHash3's)."""
_ROUNDS: Final = ((16, MIXERS[0]), (13, MIXERS[1]), (16, 1))
"""Of a word's mixing: how far it is shifted, and what it is multiplied by."""
DRAFTS: Final = 0x243F6A8885A308D3
ACCEPTS: Final = 0x13198A2E03707344
RESAMPLES: Final = 0x1082EFA98EC4E6C8
"""What a seed is salted with for each use of draws apart from the target's own: digits of pi."""


def hashed(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """32 bits for each (seed, position, token), all int64 and broadcast; int64 in 0 … 2^32 - 1."""
    return hashed_words(keys(seeds, positions), tokens.to(torch.int32)).long() & WORD


def hashed_after(seed: int, position: int, tokens: Tensor) -> Tensor:
    """`hashed` for one seed and position, whose key needs no tensors."""
    return hashed_words(key_of(seed, position), tokens.to(torch.int32)).long() & WORD


def salted(seeds: Tensor, starts: Tensor, salt: int | Tensor) -> Tensor:
    """Seeds [batch] of one cycle's own draws, which no other cycle or use has.

    A cycle is told by where its anchor stands, `starts` [batch]. Under rejection and block
    verification what was drawn for drafts that were not accepted has decided about others: drawn
    once more with the same noise, they would not be independent of it.
    """
    first, second = keys(seeds ^ salt, starts)
    return (first.long() << 32) | (second.long() & WORD)


def salted_one(seed: int, start: int, salt: int) -> int:
    """`salted` for one sequence, without tensors."""
    first, second = key_of(seed ^ salt, start)
    return (first << 32) | (second & WORD)


def uniform(bits: Tensor) -> Tensor:
    """Numbers between 0 and 1 in float32."""
    return (bits.float() + 0.5) * 2.0**-32


def keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words for each (seed, position), from which those of all tokens follow."""
    dims = max(seeds.dim(), positions.dim())
    starts = key = _starts(seeds.device).view(2, *[1] * dims)  # both words in one tensor
    for number in (seeds, positions):
        for part in (number, number >> 32):  # an int64's low and high 32 bits
            key = _mix((key ^ part.to(torch.int32)) + starts)
    return key[0], key[1]


def key_of(seed: int, position: int) -> tuple[int, int]:
    """`keys` of one pair: each of its fifty operations on tensors costs as much as all of these."""
    words = []
    for start in STARTS:
        key = start
        for number in (seed, position):
            for part in (number, number >> 32):
                key = _mix_one((key ^ part) + start)
        words.append(key - (key >> 31 << 32))
    return words[0], words[1]


def uniform_of(seed: int, position: int) -> float:
    """`uniform` of the hash of one pair's token 0, without tensors."""
    first, second = key_of(seed, position)
    bits = np.float32(_mix_one(_mix_one(first) ^ second))
    return float((bits + np.float32(0.5)) * np.float32(2.0**-32))


def hashed_words(keys: tuple[Tensor, Tensor] | tuple[int, int], tokens: Tensor) -> Tensor:
    """`hashed` for int32 tokens, as int32: the same bits in half the memory."""
    return _mix(_mix(tokens + keys[0]).bitwise_xor_(keys[1]))


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel numbers in float32: -log(-log(1 - u)), u as fine near 0 as the bits allow.

    There lies the noise that wins, and float32 cannot tell 1 - u from 1: hence the series.
    """
    u = uniform(bits).clamp(max=1 - 2.0**-24)
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


def _mix(word: Tensor) -> Tensor:
    """In place. Sums and products wrap, as unsigned ones would."""
    shifted = torch.empty_like(word)
    for bits, mixer in _ROUNDS:
        torch.bitwise_right_shift(word, _word(bits), out=shifted)
        word.bitwise_xor_(shifted.bitwise_and_(_word(WORD >> bits)))  # the sign is not shifted in
        if mixer != 1:
            word.mul_(_word(mixer))
    return word


def _mix_one(word: int) -> int:
    """`_mix` of the low 32 bits of a number."""
    word &= WORD
    for bits, mixer in _ROUNDS:
        word = (word ^ word >> bits) * mixer & WORD
    return word


@cache
def _starts(device: torch.device) -> Tensor:
    return torch.stack([_word(start) for start in STARTS]).to(device)


@cache
def _word(bits: int) -> Tensor:
    """An int32 of these bits as a tensor: PyTorch would make one of a number at every call."""
    return torch.tensor(bits - (bits >> 31 << 32), dtype=torch.int32)
