"""Which context positions and block slots a block slot may see."""

from __future__ import annotations

import torch
from torch import Tensor


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of every slot: [rows, anchors] -> [rows, anchors * block]."""
    slots = torch.arange(block_size, device=anchors.device)
    return (anchors.unsqueeze(-1) + slots).flatten(1)


def block_mask(
    *,
    anchors: Tensor,  # [rows, anchors]: absolute position of each block's anchor
    block_size: int,
    context_positions: Tensor,  # [rows, context]: absolute position of each context slot
    window: int | None = None,
    causal: bool = False,
    anchor_documents: Tensor | None = None,  # [rows, anchors]
    context_documents: Tensor | None = None,  # [rows, context]
) -> Tensor:
    """Boolean [rows, 1, anchors * block, context + anchors * block], True = visible.

    A slot sees the context before its anchor (of its own document, where documents are
    packed) and all of its own block. A window limits both by distance; `causal` hides the
    later slots of the block. Decoding is the case of one anchor a row, where unused cache
    slots lie at positions past the anchor and so are hidden by the same rule.
    """
    positions = block_positions(anchors, block_size)
    slot_anchor = anchors.repeat_interleave(block_size, dim=1)
    block_index = torch.arange(anchors.shape[1], device=anchors.device)
    slot_block = block_index.repeat_interleave(block_size)

    # [rows, queries, context]
    context = context_positions.unsqueeze(1) < slot_anchor.unsqueeze(2)
    if anchor_documents is not None and context_documents is not None:
        slot_document = anchor_documents.repeat_interleave(block_size, dim=1)
        context = context & (context_documents.unsqueeze(1) == slot_document.unsqueeze(2))
    # [rows, queries, queries]
    block = (slot_block.unsqueeze(0) == slot_block.unsqueeze(1)).expand(anchors.shape[0], -1, -1)

    if window is not None:
        context = context & (positions.unsqueeze(2) - context_positions.unsqueeze(1) < window)
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        block = block & (distance.abs() < window)
        if causal:
            block = block & (distance >= 0)
    return torch.cat((context, block), dim=2).unsqueeze(1)
