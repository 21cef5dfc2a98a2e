"""Keys and values in slots: never moved while a sequence runs."""

from __future__ import annotations

import math
import mmap
import sys

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


class SlotCache:
    """For each layer keys and values [slots, kv heads, capacity, head_dim].

    A sequence lives in a slot and owns its first `lengths[slot]` places. A forward writes after
    them; `commit` says how many of those are kept.
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

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots, as many and as long as these; the old ones' memory is given back first."""
        self.capacity = capacity
        self.free()
        shape = (self._layers, 2, slots, self._kv_heads, capacity, self._head_dim)
        # Zeros, not garbage: a masked NaN would still poison a product.
        self._states = lazy_zeros(shape, like=self._states)

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        self._states = self._states.new_empty(0)

    def reserve(self, block: int) -> None:
        """Room for what a block of so many tokens leaves until `commit`: here none is needed."""

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another, in all layers."""
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
        compact(self._states, slots, starts, path)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values."""
        return self._states[index, 0], self._states[index, 1]

    @property
    def layers(self) -> tuple[Tensor, Tensor]:
        """All layers' keys and values, [layers, slots, kv heads, capacity, head_dim]."""
        return self._states[:, 0], self._states[:, 1]

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
    """Numbers kept for every token in slots, [slots, capacity, ...]."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = 0
        self._shape = shape
        self._states = torch.empty(0, dtype=dtype, device=device)

    def resize(self, *, slots: int, capacity: int) -> None:
        """Empty slots; the old ones' memory is given back first."""
        self.capacity = capacity
        self.free()
        self._states = lazy_zeros((slots, capacity, *self._shape), like=self._states)

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        self._states = self._states.new_empty(0)

    def copy(self, source: int, goal: int, count: int) -> None:
        """The first tokens of one slot into another."""
        self._states[goal, :count] = self._states[source, :count]

    def write(self, states: Tensor, slots: Tensor, starts: Tensor) -> None:
        """Of new tokens [batch, count, ...], from each start on."""
        self._states[slots.unsqueeze(1), self.places(starts, states.shape[1])] = states

    def read(self, slots: Tensor, places: Tensor) -> Tensor:
        """Of some places [batch, n] of each slot [batch]: [batch, n, ...]."""
        return self._states[slots.unsqueeze(1), places]

    def places(self, starts: Tensor, count: int) -> Tensor:
        """So many places from each start on, [batch, count].

        Sequences that only fill up a batch run past the end of their slot; theirs is the last.
        """
        steps = torch.arange(count, device=starts.device)
        return (starts.unsqueeze(1) + steps).clamp(max=self.capacity - 1)

    def of(self, slots: Tensor) -> Tensor:
        """All places of some slots, [batch, capacity, ...]."""
        return self._states[slots]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self._states.nbytes
