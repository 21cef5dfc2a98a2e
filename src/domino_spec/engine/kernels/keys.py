"""A score and its token in one integer, so that the largest integer is the best token.

The upper half orders as the float32 score does, the lower falls with the id: of equal scores the
lowest id wins. No two keys of a row are equal, so any way of sorting them gives the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.runtime import triton_available

LAST_ID = 0x7FFFFFFF


def pack_reference(scores: Tensor, ids: Tensor) -> Tensor:
    """Keys, int64; zeros of either sign are equal."""
    scores = scores.float()
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    # Negative floats grow in magnitude with their bits, so all bits but the sign are turned.
    ordered = bits ^ ((bits >> 31) & LAST_ID)
    return (ordered.long() << 32) | (LAST_ID - ids)


def unpack_reference(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, float32, and ids, int64."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & LAST_ID)).view(torch.float32)
    return scores, LAST_ID - (keys & 0xFFFFFFFF)


if triton_available():
    import triton
    import triton.language as tl

    @triton.jit
    def order(scores):
        """A key's upper half: integers that order as float32 scores do."""
        bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit
    def pack(scores, ids):
        """As `pack_reference`, of float32 scores and int32 ids."""
        return (order(scores).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)

    @triton.jit
    def unpack_ids(keys):
        """The tokens, int64."""
        return 0x7FFFFFFF - (keys & 0xFFFFFFFF)

    @triton.jit
    def unpack_scores(keys):
        """The scores, float32."""
        ordered = (keys >> 32).to(tl.int32)
        return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
