"""`decoding.noise` inside kernels: the same integers, and the same noise up to the last bits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from domino_spec.decoding.noise import MIXERS, STARTS
from domino_spec.engine.kernels.runtime import triton_available


class Noise(NamedTuple):
    """What the draws of a batch's rows are made from."""

    temperature: Tensor  # [rows] float; 0 is greedy
    seeds: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64: of the first token to be chosen


if triton_available():
    import triton
    import triton.language as tl

    _FIRST, _SECOND = (tl.constexpr(start) for start in STARTS)
    _MIX1, _MIX2 = (tl.constexpr(mixer) for mixer in MIXERS)

    @triton.jit
    def _mixed(word):
        word = (word ^ (word >> 16)) * _MIX1
        word = (word ^ (word >> 13)) * _MIX2
        return word ^ (word >> 16)

    @triton.jit
    def _keyed(START: tl.constexpr, seed, position):
        key = _mixed((seed.to(tl.uint32) ^ START) + START)
        key = _mixed((key ^ (seed >> 32).to(tl.uint32)) + START)
        key = _mixed((key ^ position.to(tl.uint32)) + START)
        return _mixed((key ^ (position >> 32).to(tl.uint32)) + START)

    @triton.jit
    def hashed_bits(seed, position, tokens):
        """`hashed` for one seed and position (int64) and any tokens, as uint32."""
        first = _keyed(_FIRST, seed, position)
        second = _keyed(_SECOND, seed, position)
        return _mixed(_mixed(tokens.to(tl.uint32) + first) ^ second)

    @triton.jit
    def gumbel_of(seed, position, tokens):
        """`gumbel` for one seed and position and any tokens."""
        bits = hashed_bits(seed, position, tokens)
        u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
        return -tl.log(tl.where(u < 2.0**-6, series, -tl.log(1 - u)))

    @triton.jit
    def noised_logits(logits, tokens, temperature, seed, position):
        """`noised` for one row: float32 logits, its tokens and its three numbers."""
        warm = temperature > 0
        drawn = logits / tl.where(warm, temperature, 1.0) + gumbel_of(seed, position, tokens)
        return tl.where(warm, drawn, logits)
