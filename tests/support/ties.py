"""Tells a numerical near-tie from a bug where a kernel rounds blocks and single steps apart."""

from __future__ import annotations

import torch
from transformers import DynamicCache


@torch.no_grad()
def first_difference_is_a_tie(model, prompt, plain, found) -> bool:
    """Whether the first different token is within what the kernels themselves differ by.

    The bound is measured, not chosen: the gap between the two tokens must be below twice the
    largest difference, at that position, between logits of single steps and of larger blocks.
    """
    place = next(i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a != b)
    ids = torch.tensor([list(prompt) + plain[:place]], device=model.device)

    def last_logits(block: int) -> torch.Tensor:
        cache, start = DynamicCache(), 0
        while start < ids.shape[1]:
            piece = ids[:, start : start + block]
            logits = model(piece, past_key_values=cache, use_cache=True).logits[0, -1].float()
            start += piece.shape[1]
        return logits

    single = last_logits(1)
    spread = max(float((last_logits(size) - single).abs().max()) for size in (2, 3, 5, 8, 16, 999))
    gap = float(single[plain[place]] - single[found[place]])
    return gap < 2 * spread
