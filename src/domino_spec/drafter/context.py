"""The draft cache: context keys and values only, a ragged length per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.drafter.layers import KeyValue


class DraftContext:
    """Per-layer keys and values of verified tokens. The block's own are never kept."""

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self._layers: list[KeyValue] = []

    @property
    def size(self) -> int:
        """Slots in use by the longest row."""
        return max(self.lengths, default=0)

    def layers(self) -> list[KeyValue]:
        """Views [rows, kv heads, size, head_dim]; a shorter row's tail is garbage to be masked."""
        return [
            (keys[:, :, : self.size], values[:, :, : self.size]) for keys, values in self._layers
        ]

    def append(self, layers: Sequence[KeyValue], counts: Sequence[int]) -> None:
        """Add the first `counts[row]` of the new positions behind each row's length."""
        needed = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        self._reserve(layers, needed)
        for (keys, values), (new_keys, new_values) in zip(self._layers, layers, strict=True):
            for row, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
                keys[row, :, start : start + count] = new_keys[row, :, :count]
                values[row, :, start : start + count] = new_values[row, :, :count]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        self._layers = [(keys[rows], values[rows]) for keys, values in self._layers]

    def _reserve(self, like: Sequence[KeyValue], needed: int) -> None:
        if self._layers and self._layers[0][0].shape[2] >= needed:
            return
        capacity = 2 * needed  # grow in doublings: appending stays linear in the tokens
        grown = []
        for index, pair in enumerate(like):
            old = self._layers[index] if self._layers else (None, None)
            grown.append(
                (_extended(old[0], pair[0], capacity), _extended(old[1], pair[1], capacity))
            )
        self._layers = grown


def _extended(old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
    rows, heads, _, head_dim = like.shape
    new = torch.zeros(rows, heads, capacity, head_dim, dtype=like.dtype, device=like.device)
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new
