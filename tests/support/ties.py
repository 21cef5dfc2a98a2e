"""Tells a numerical near-tie from a bug where kernels round by the shape of a forward."""

from __future__ import annotations

import torch

from domino_spec.targets import Target

BLOCKS = (2, 5, 8, 16)
ROWS = 7


@torch.no_grad()
def first_difference_is_a_tie(target: Target, prompt, plain, found) -> bool:
    """Whether the first different token is within what the kernels themselves differ by.

    The bound is measured, not chosen: the gap between the two tokens must be below twice the
    largest difference, at that position, between logits of single steps and of the shapes that
    decoding uses: larger blocks, alone and in batches of rows of different lengths.
    """
    place = next(i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a != b)
    ids = list(prompt) + plain[:place]
    single = _by_blocks(target, ids, 1)
    others = [_by_blocks(target, ids, size) for size in (*BLOCKS, len(ids))]
    others += [_in_ragged_batch(target, ids, size) for size in (1, *BLOCKS) if size < len(ids)]
    spread = max(float((logits - single).abs().max()) for logits in others)
    gap = float(single[plain[place]] - single[found[place]])
    return gap < 2 * spread


def _by_blocks(target: Target, ids: list[int], size: int) -> torch.Tensor:
    """Logits behind the last token, fed in blocks of this size."""
    cache = target.new_cache(1)
    for start in range(0, len(ids), size):
        piece = torch.tensor([ids[start : start + size]])
        logits = target.forward(piece, cache).logits
        cache.commit([piece.shape[1]])
    return logits[0, -1].float()


def _in_ragged_batch(target: Target, ids: list[int], size: int) -> torch.Tensor:
    """The same, the last block fed in a batch beside longer rows."""
    head, tail = ids[:-size], ids[-size:]
    width = len(head) + ROWS - 1
    rows = torch.tensor([(head + ids * ROWS)[:width]] * ROWS)
    cache = target.new_cache(ROWS)
    target.forward(rows, cache)
    cache.commit([len(head) + extra for extra in range(ROWS)])
    logits = target.forward(torch.tensor([tail] * ROWS), cache).logits
    return logits[0, -1].float()
