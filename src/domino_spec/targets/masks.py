"""Attention masks for rows of different lengths in one cache and for documents in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.errors import TargetError
from domino_spec.targets.cache import TargetCache
from domino_spec.targets.support import FULL_ATTENTION, SLIDING_ATTENTION

Mask = Tensor | dict[str, Tensor]

MASKED_ATTENTION = ("sdpa", "eager")
"""The implementations that take a mask of any form."""


def ragged_mask(
    cache: TargetCache,
    count: int,
    *,
    kinds: Sequence[str],
    window: int | None,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Mask:
    """Causal mask by true positions, one per attention kind the model mixes.

    Transformers would compare slot numbers; behind a shorter row's garbage those run ahead of
    the positions, which a sliding window would notice.
    """
    if attention not in MASKED_ATTENTION:
        raise TargetError(
            f"rows of different lengths need a mask that {attention!r} attention does not take; "
            "load the target with attn_implementation='sdpa' or decode one row at a time."
        )
    slots = torch.arange(cache.slots, device=device)
    lengths = torch.tensor(cache.lengths, device=device).unsqueeze(1)
    new = cache.positions(count, device)  # [rows, count]
    hidden = torch.iinfo(torch.long).max  # a position after every query
    cached = torch.where(slots < lengths, slots, hidden)  # [rows, slots]
    keys = torch.cat((cached, new), dim=1).unsqueeze(1)
    queries = new.unsqueeze(2)
    visible = keys <= queries  # [rows, count, slots + count]
    return _by_kind(visible, queries - keys, kinds, window, attention, dtype)


def packed_mask(
    positions: Tensor,  # [rows, n]: restart with each document
    documents: Tensor,  # [rows, n]
    *,
    kinds: Sequence[str],
    window: int | None,
    attention: str,
    dtype: torch.dtype,
) -> Mask:
    """Causal mask inside each of a row's documents, one per attention kind the model mixes."""
    if attention not in MASKED_ATTENTION:
        raise TargetError(
            f"several documents in one row need a mask that {attention!r} attention does not "
            "take; load the target with attn_implementation='sdpa'."
        )
    distance = positions.unsqueeze(2) - positions.unsqueeze(1)  # [rows, queries, keys]
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (distance >= 0)
    return _by_kind(visible, distance, kinds, window, attention, dtype)


def _by_kind(
    visible: Tensor,
    distance: Tensor,
    kinds: Sequence[str],
    window: int | None,
    attention: str,
    dtype: torch.dtype,
) -> Mask:
    masks = {FULL_ATTENTION: visible}
    if window is not None:
        masks[SLIDING_ATTENTION] = visible & (distance < window)
    ready = {kind: _as_taken(masks[kind], attention, dtype).unsqueeze(1) for kind in set(kinds)}
    return ready if len(ready) > 1 else next(iter(ready.values()))


def _as_taken(visible: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    if attention == "sdpa":
        return visible
    # Eager attention adds its mask to the scores.
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, torch.finfo(dtype).min
    )
