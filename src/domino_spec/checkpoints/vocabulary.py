"""The map of a reduced vocabulary: stored as offsets, used as target ids."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.checkpoints.names import OFFSETS
from domino_spec.errors import CheckpointError


def draft_tokens(
    offsets: Tensor, *, vocab_size: int, draft_vocab_size: int | None
) -> Tensor | None:
    """Target id of each draft token; None for the target's whole vocabulary in its own order."""
    tokens = torch.arange(len(offsets)) + offsets.to("cpu", torch.long)
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{OFFSETS}[{index}] maps to target id {int(tokens[index])}, outside the vocabulary of "
            f"{vocab_size}; the map belongs to another target or is broken."
        )
    times_used = tokens.bincount()
    if (times_used > 1).any():
        token = int(times_used.argmax())
        raise CheckpointError(
            f"{OFFSETS} maps {int(times_used[token])} draft tokens to target id {token}; expected "
            "each target id at most once. The map is broken."
        )
    if draft_vocab_size is not None:
        return tokens
    if offsets.any():
        raise CheckpointError(
            f"{OFFSETS} reorders the vocabulary, but config.json states no reduced one; set "
            "draft_vocab_size, or remove the map."
        )
    return None


def offsets(tokens: Tensor) -> Tensor:
    """What is stored for these target ids."""
    return tokens.to("cpu", torch.long) - torch.arange(len(tokens))
