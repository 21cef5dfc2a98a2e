"""Which context positions and block slots a block slot may see: one rule, two forms.

`visibility` is the rule. `dense_mask` evaluates it everywhere for scaled-dot-product attention;
`flex_mask` hands it to FlexAttention, which skips blocks that no query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mask = Tensor | BlockMask
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) -> whether the query may see the key; all are broadcast indices."""


class Window(NamedTuple):
    """A layer's sliding window, and the sink tokens before it."""

    size: int
    """A token sees those nearer than this."""
    sink_tokens: int = 0
    """Of a sequence's first tokens so many are seen from any distance."""

    def sees(self, distance: Tensor, position: Tensor) -> Tensor:
        """Whether keys at such positions and distances from their queries are seen."""
        near = distance.abs() < self.size
        return near | (position < self.sink_tokens) if self.sink_tokens else near


ALL_CONTEXT = Window(0)
"""Asked for in place of a drafter's own windows: no layer has any."""

FLEX_BLOCK = 128
"""FlexAttention skips tiles of this many queries and keys."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Blocks of slots after their context: queries are the slots, keys context then slots."""

    anchors: Tensor  # [batch, anchors]: absolute position of each block's anchor
    block_size: int
    context_positions: Tensor  # [batch, context]: absolute position of each context slot
    anchor_documents: Tensor | None = None  # [batch, anchors]
    context_documents: Tensor | None = None  # [batch, context]

    @property
    def queries(self) -> int:
        """Slots a row."""
        return self.anchors.shape[1] * self.block_size

    @property
    def keys(self) -> int:
        """Context positions and slots a row."""
        return self.context_positions.shape[1] + self.queries


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of every slot: [batch, anchors] -> [batch, anchors * block]."""
    slots = torch.arange(block_size, device=anchors.device)
    return (anchors.unsqueeze(-1) + slots).flatten(1)


def visibility(layout: BlockLayout, *, window: Window | None = None, causal: bool = False) -> Rule:
    """The rule: the context before the anchor, of its own document, and the whole own block.

    A window limits both by distance, but for its sink tokens; `causal` hides the later slots of
    the block. Decoding is the case of one anchor a row, where unused cache slots lie at positions
    past the anchor and so are hidden by the same rule.
    """
    block_size = layout.block_size
    context = layout.context_positions.shape[1]
    anchors, context_positions = layout.anchors, layout.context_positions
    anchor_documents, context_documents = layout.anchor_documents, layout.context_documents
    packed = anchor_documents is not None and context_documents is not None

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        anchor = anchors[row, block]
        own_block = (key >= context) & ((key - context) // block_size == block)
        if context == 0:
            before = key < 0
        else:
            place = key.clamp(max=context - 1)
            position = context_positions[row, place]
            before = (key < context) & (position < anchor)
            if packed:
                assert anchor_documents is not None
                assert context_documents is not None
                before = before & (context_documents[row, place] == anchor_documents[row, block])
            if window is not None:
                distance = anchor + query % block_size - position
                before = before & window.sees(distance, position)
        if window is not None:
            slot = (key - context) % block_size
            distance = query % block_size - slot
            own_block = own_block & window.sees(distance, anchor + slot)
        if causal:
            own_block = own_block & (key - context <= query)
        return before | own_block

    return rule


def dense_mask(
    layout: BlockLayout, *, window: Window | None = None, causal: bool = False
) -> Tensor:
    """Boolean [batch, 1, anchors * block, context + anchors * block], True = visible."""
    device = layout.anchors.device
    row = torch.arange(layout.anchors.shape[0], device=device).view(-1, 1, 1, 1)
    query = torch.arange(layout.queries, device=device).view(1, 1, -1, 1)
    key = torch.arange(layout.keys, device=device).view(1, 1, 1, -1)
    return visibility(layout, window=window, causal=causal)(row, row, query, key)


def flex_mask(
    layout: BlockLayout, *, window: Window | None = None, causal: bool = False, compiled: bool
) -> BlockMask:
    """The same rule for FlexAttention."""
    return create_block_mask(
        visibility(layout, window=window, causal=causal),
        layout.anchors.shape[0],
        None,
        layout.queries,
        layout.keys,
        device=str(layout.anchors.device),
        BLOCK_SIZE=FLEX_BLOCK,
        _compile=compiled,
    )
