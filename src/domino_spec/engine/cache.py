"""Keys and values in slots: never moved while a sequence runs.

On a CPU, whose system gives memory to what is written alone, a slot is one stretch of the cache. On
a GPU it is a row of a table of pages: memory follows use, and sequences share what begins alike.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from domino_spec.engine.kernels.compact import compact

_PRIVATE: dict[str, int] = (
    {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
)
"""A process that is forked must not write into its parent's caches."""


def lazy_zeros(shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Zeros; on a CPU the system gives memory to those alone that are written."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, size, **_PRIVATE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


PAGE = 64
"""Tokens of a page on a GPU: what attention's kernels read at once."""


class PageTable:
    """Which page of the caches holds which tokens of each slot, on the device.

    All caches of an engine have the same pages. Page 0 is nobody's: what is written where a slot
    has no page goes there.
    """

    def __init__(
        self, *, slots: int, capacity: int, pages: int, page: int, device: torch.device
    ) -> None:
        self.page = page
        """Tokens of a page."""
        self.count = pages
        """Pages of each cache, nobody's among them."""
        self.width = -(-capacity // page)
        self._host = torch.zeros(slots, self.width, dtype=torch.int32)
        self._changed: set[int] = set()
        self.table = self._host.to(device, copy=True)

    def clear(self, slot: int) -> None:
        """A slot without pages."""
        self._host[slot].zero_()
        self._changed.add(slot)

    def put(self, slot: int, first: int, pages: Iterable[int]) -> None:
        """A slot's pages from one place on."""
        found = torch.tensor(list(pages), dtype=torch.int32)
        self._host[slot, first : first + len(found)] = found
        self._changed.add(slot)

    def send(self) -> None:
        """Let the device know, after what it was given to do and before what follows."""
        if not self._changed:
            return
        slots = torch.tensor(sorted(self._changed))
        self._changed.clear()
        rows = self._host[slots]
        if self.table.is_cuda:
            slots, rows = slots.pin_memory(), rows.pin_memory()
        device = self.table.device
        self.table.index_copy_(
            0, slots.to(device, non_blocking=True), rows.to(device, non_blocking=True)
        )


class LayerCache(NamedTuple):
    """Keys and values of a layer, or of several with one more dimension before the others."""

    keys: Tensor  # [pages, kv heads, tokens a page, head_dim]
    values: Tensor
    table: Tensor | None  # [slots, pages a slot]; None: each slot is a page


def pages_of(slots: Tensor, table: Tensor | None) -> Tensor:
    """Where slots' tokens lie, [n, pages a slot]."""
    return slots.unsqueeze(1) if table is None else table.index_select(0, slots)


class SlotCache:
    """For each layer keys and values [pages, kv heads, tokens a page, head_dim].

    A sequence lives in a slot, one page or a row of a table, and owns its first `lengths[slot]`
    places. A forward writes after them; `commit` says how many of those are kept.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 0,
        capacity: int = 1,
    ) -> None:
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._states = torch.empty(0, dtype=dtype, device=device)
        self.resize(slots=slots, capacity=capacity)

    def resize(self, *, slots: int, capacity: int, pages: PageTable | None = None) -> None:
        """Empty slots, as many and as long as these; the old ones' memory is given back first."""
        self.slots, self.capacity, self._pages = slots, capacity, pages
        self.free()
        count, page = (slots, capacity) if pages is None else (pages.count, pages.page)
        shape = (self._layers, 2, count, self._kv_heads, page, self._head_dim)
        # Zeros, not garbage: a masked NaN would still poison a product.
        self._states = lazy_zeros(shape, like=self._states)

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        self._states = self._states.new_empty(0)

    def reserve(self, block: int) -> None:
        """Room for what a block of so many tokens leaves until `commit`: here none is needed."""

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another, in all layers; slots of pages share them."""
        assert self._pages is None
        self._states[:, :, goal, :, :count] = self._states[:, :, source, :, :count]

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """Keep the anchor and the accepted drafts [n] of the last forward in slots [n], no more.

        Rolls the rest back. Here the length, which `Slots` holds, says it all: the next forward
        writes over what is left. `recurrent.HybridCache` has more to do.
        """

    def compact(self, slots: Tensor, starts: Tensor, path: Tensor) -> None:
        """Move a tree's accepted drafts to where a chain's would be: path[i, j] to j.

        `path` [n, places] counts from each start on, the anchor first; what is not accepted stays.
        """
        compact(self._states, pages_of(slots, self._table), starts, path)

    def layer(self, index: int) -> LayerCache:
        """One layer's keys and values."""
        return LayerCache(self._states[index, 0], self._states[index, 1], self._table)

    @property
    def layers(self) -> LayerCache:
        """All layers' keys and values, [layers, pages, kv heads, tokens a page, head_dim]."""
        return LayerCache(self._states[:, 0], self._states[:, 1], self._table)

    @property
    def _table(self) -> Tensor | None:
        return None if self._pages is None else self._pages.table

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._states.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self._layers * self._kv_heads * self._head_dim * self.element_size

    @property
    def element_size(self) -> int:
        """Bytes of one number."""
        return self._states.element_size()


class SlotStates:
    """Numbers kept for every token in slots, [pages, tokens a page, ...]."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = 0
        self._shape = shape
        self._pages: PageTable | None = None
        self._states = torch.empty(0, dtype=dtype, device=device)

    def resize(self, *, slots: int, capacity: int, pages: PageTable | None = None) -> None:
        """Empty slots; the old ones' memory is given back first."""
        self.capacity, self._pages = capacity, pages
        self.free()
        count, page = (slots, capacity) if pages is None else (pages.count, pages.page)
        self._states = lazy_zeros((count, page, *self._shape), like=self._states)

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        self._states = self._states.new_empty(0)

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another; slots of pages share them."""
        assert self._pages is None
        self._states[goal, :count] = self._states[source, :count]

    def write(self, states: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Of new tokens [batch, count, ...], from each start on."""
        self._states[self._where(slots, self.places(starts, states.shape[1]))] = states

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """Of some places [batch, n] of each slot [batch]: [batch, n, ...]."""
        return self._states[self._where(slots, places)]

    def _where(self, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        if self._pages is None:
            return slots.unsqueeze(1), places
        page, pages = self._pages.page, pages_of(slots, self._pages.table)
        return pages.gather(1, places // page).long(), places % page

    def places(self, starts: Tensor, count: int) -> Tensor:
        """So many places from each start on, [batch, count].

        Sequences that only fill up a batch run past the end of their slot; theirs is the last.
        """
        steps = torch.arange(count, device=starts.device)
        return (starts.unsqueeze(1) + steps).clamp(max=self.capacity - 1)

    def of(self, slots: Tensor) -> Tensor:
        """All places of some slots, [batch, capacity, ...]."""
        if self._pages is None:
            return self._states[slots]
        return self._states[pages_of(slots, self._pages.table)].flatten(1, 2)[:, : self.capacity]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._states.nbytes
