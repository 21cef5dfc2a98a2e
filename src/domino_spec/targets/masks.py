"""Attention masks for rows of different lengths that share one cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.errors import TargetError
from domino_spec.targets.cache import TargetCache
from domino_spec.targets.support import FULL_ATTENTION, SLIDING_ATTENTION

Mask = Tensor | dict[str, Tensor]


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
    if attention not in ("sdpa", "eager"):
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
    masks = {FULL_ATTENTION: visible}
    if window is not None:
        masks[SLIDING_ATTENTION] = visible & (queries - keys < window)
    ready = {kind: _as_taken(masks[kind], attention, dtype).unsqueeze(1) for kind in set(kinds)}
    return ready if len(ready) > 1 else next(iter(ready.values()))


def _as_taken(visible: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    if attention == "sdpa":
        return visible
    # Eager attention adds its mask to the scores.
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
        ~visible, torch.finfo(dtype).min
    )
