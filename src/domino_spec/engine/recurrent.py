"""Gated delta rule: a layer that sums all tokens up in one state, in slots, with exact roll-back.

A head's state S [key, value] is a linear map that is taught pairs: a token decays it by exp(g),
takes back the share beta of what S says of its key k, and writes the same share of its value v.
So S after n tokens is a sum: exp(g_1 + ... + g_n) S_0 + sum_i exp(g_(i+1) + ... + g_n) k_i u_i,
where the update u_i depends on S_0 and the tokens up to i alone. A forward finds the updates of all
its tokens together, by one triangular system for each chunk.

That sum is also what rolls a block back. A forward that verifies drafts leaves S_0 as it is and
records its keys, updates and decays; `commit` adds up the first few of them. No weight is read for
that, the states are those of the forward that verified, and shapes do not depend on how many drafts
were accepted. What convolutions read of the last tokens is kept in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_spec.engine.cache import LayerCache, PageTable, SlotCache, lazy_zeros
from domino_spec.errors import TargetError

_CHUNK = 64
"""Tokens of one triangular system."""
_EPS = 1e-6
"""Of the keys' and queries' norm, as Transformers has it."""


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of a layer with a gated delta rule."""

    key_heads: int
    value_heads: int
    """A multiple of the key heads, which so many share in turn."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution before it reads."""

    @property
    def key_width(self) -> int:
        """Of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def slot_bytes(self, block: int, dtype: torch.dtype) -> int:
        """What one layer keeps of a sequence that commits up to `block` tokens at a time."""
        state = self.value_width * self.key_dim
        record = block * (self.key_width + self.value_width + self.value_heads)
        inputs = (self.kernel - 1 + block) * self.channels
        return (state + record) * torch.float32.itemsize + inputs * dtype.itemsize


def read_delta_shape(config: Any) -> DeltaShape:
    """By the names that Qwen's configurations share."""
    return DeltaShape(
        key_heads=int(config.linear_num_key_heads),
        value_heads=int(config.linear_num_value_heads),
        key_dim=int(config.linear_key_head_dim),
        value_dim=int(config.linear_value_head_dim),
        kernel=int(config.linear_conv_kernel_dim),
    )


def convolve(inputs: Tensor, kernel: Tensor) -> Tensor:
    """Each channel over its last tokens: [batch, width - 1 + n, channels] -> [batch, n, channels].

    `kernel` is [channels, 1, width]. Added up in float32 and rounded once.
    """
    weights, wide = kernel[:, 0].float().unbind(1), inputs.float()
    count = inputs.shape[1] - len(weights) + 1
    found = wide[:, :count] * weights[0]
    for place, weight in enumerate(weights[1:], start=1):
        found.addcmul_(wide[:, place : place + count], weight)
    return found.to(inputs.dtype)


def unit(states: Tensor) -> Tensor:
    """Rows of length one, in float32."""
    wide = states.float()
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _EPS)


def gated_delta_rule(
    query: Tensor,  # [batch, n, key heads, key_dim] float32, of length one
    key: Tensor,
    value: Tensor,  # [batch, n, value heads, value_dim] float32
    decay: Tensor,  # [batch, n, value heads] float32, not positive
    beta: Tensor,  # [batch, n, value heads] float32
    state: Tensor,  # [batch, value heads, key_dim, value_dim] float32
) -> tuple[Tensor, Tensor, Tensor]:
    """What each token reads [batch, n, value heads, value_dim], its update, and the last state."""
    batch, count, heads, _ = value.shape
    size = min(count, _CHUNK)
    padding = -count % size

    def chunked(states: Tensor) -> Tensor:  # [batch, value heads, chunks, size, width]
        states = states.repeat_interleave(heads // states.shape[2], dim=2).transpose(1, 2)
        if padding:
            states = torch.nn.functional.pad(states, (0, 0, 0, padding))
        return states.reshape(batch, heads, -1, size, states.shape[-1])

    query, key, value = chunked(query * query.shape[-1] ** -0.5), chunked(key), chunked(value)
    beta = chunked(beta.unsqueeze(-1))
    total = chunked(decay.unsqueeze(-1)).cumsum(dim=3)  # log of the decay since the chunk's start
    later = torch.ones(size, size, dtype=torch.bool, device=state.device).triu(1)
    between = (total - total.transpose(3, 4)).masked_fill(later, -torch.inf).exp()
    reached = total.exp()
    updates = beta * torch.cat((value, key * reached), dim=-1)
    if size > 1:
        system = beta * between * (key @ key.transpose(3, 4))  # its diagonal counts as ones
        updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    own, from_state = updates.tensor_split([value.shape[-1]], dim=-1)
    scores = between * (query @ key.transpose(3, 4))
    query = query * reached
    last = total[:, :, :, -1:]
    key, last = (key * (last - total).exp()).transpose(3, 4), last.exp()
    mixed: list[Tensor] = []
    taught: list[Tensor] = []
    for chunk in range(own.shape[2]):
        update = own[:, :, chunk] - from_state[:, :, chunk] @ state
        mixed.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ update)
        taught.append(update)
        state = state * last[:, :, chunk] + key[:, :, chunk] @ update

    def whole(chunks: list[Tensor]) -> Tensor:  # [batch, n, value heads, width]
        return torch.cat(chunks, dim=2)[:, :, :count].transpose(1, 2)

    return whole(mixed), whole(taught), state


class RecurrentSlots:
    """One layer's states in slots, and of each slot's last block what `commit` adds up."""

    def __init__(self, shape: DeltaShape, *, slots: int, block: int, like: Tensor) -> None:
        """Inputs of the convolution are `like` this tensor, states in float32."""

        def zeros(*size: int, of: Tensor) -> Tensor:
            return lazy_zeros((slots, *size), like=of)

        wide, heads = like.new_empty(0, dtype=torch.float32), shape.value_heads
        self.states = zeros(heads, shape.key_dim, shape.value_dim, of=wide)
        self._keys = zeros(block, shape.key_heads, shape.key_dim, of=wide)
        self._updates = zeros(block, heads, shape.value_dim, of=wide)
        self._totals = zeros(block, heads, of=wide)
        """Of the decays' logarithms, up to each token."""
        self._tail = shape.kernel - 1
        self.inputs = zeros(self._tail + block, shape.channels, of=like)
        """Of the convolution: those of the last committed tokens, then those of the block."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        parts = (self.states, self._keys, self._updates, self._totals, self.inputs)
        return sum(part.nbytes for part in parts)

    def read(self, slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """States, and inputs of the last tokens, of slots that hold `starts` tokens; 0 of none."""
        fresh = (starts == 0).view(-1, 1, 1)
        states = self.states[slots].masked_fill(fresh.unsqueeze(3), 0.0)
        return states, self.inputs[slots, : self._tail].masked_fill(fresh, 0.0)

    def store(self, slots: Tensor, states: Tensor, inputs: Tensor, kept: Tensor) -> None:
        """After a forward whose first `kept` tokens [n] stay, all `inputs` of which are given."""
        self.states[slots] = states
        self.inputs[slots, : self._tail] = self._tail_of(inputs, kept)

    def record(
        self, slots: Tensor, keys: Tensor, updates: Tensor, decay: Tensor, inputs: Tensor
    ) -> None:
        """Of a block [n, count, ...] that is to be committed."""
        count, room = keys.shape[1], self._keys.shape[1]
        assert count <= room, f"a block of {count} tokens where there is room for {room}"
        self._keys[slots, :count] = keys
        self._updates[slots, :count] = updates
        self._totals[slots, :count] = decay.cumsum(dim=1)
        self.inputs[slots, : self._tail + count] = inputs

    def commit(self, slots: Tensor, kept: Tensor) -> None:
        """Add up the first `kept` tokens [n], one or more, of each slot's last block."""
        totals, keys, updates = (
            part[slots].transpose(1, 2) for part in (self._totals, self._keys, self._updates)
        )  # totals [n, value heads, block], the others with a width each
        keys = keys.repeat_interleave(updates.shape[1] // keys.shape[1], dim=1)
        places = torch.arange(totals.shape[2], device=slots.device)
        ends = (kept - 1).view(-1, 1, 1)
        last = totals.gather(2, ends.expand(-1, totals.shape[1], 1))
        weights = (last - totals).masked_fill(places > ends, -torch.inf).exp().unsqueeze(3)
        added = (keys * weights).transpose(2, 3) @ updates
        self.states[slots] = added.addcmul_(self.states[slots], last.exp().unsqueeze(3))
        self.inputs[slots, : self._tail] = self._tail_of(self.inputs[slots], kept)

    def _tail_of(self, inputs: Tensor, kept: Tensor) -> Tensor:
        """The last inputs of `kept` tokens [n], which follow those of earlier ones."""
        places = kept.unsqueeze(1) + torch.arange(self._tail, device=kept.device)
        return inputs.gather(1, places.unsqueeze(2).expand(-1, -1, inputs.shape[2]))


class HybridCache(SlotCache):
    """Keys and values of the layers that attend, states of those that sum up."""

    def __init__(
        self, shape: DeltaShape, *, linear: Sequence[int], layers: int, slots: int, capacity: int,
        kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """`linear` are the layers that sum up, of so many."""
        attending = [index for index in range(layers) if index not in linear]
        self._places = {index: place for place, index in enumerate(attending)}
        self._shape, self._linear, self._block = shape, linear, 1
        self._recurrent: dict[int, RecurrentSlots] = {}
        super().__init__(
            layers=len(attending), slots=slots, capacity=capacity, kv_heads=kv_heads,
            head_dim=head_dim, dtype=dtype, device=device,
        )  # fmt: skip

    def reserve(self, block: int) -> None:
        """Room for the record of so many tokens a slot; slots are empty afterwards."""
        self._block = block
        self.resize(slots=self.slots, capacity=self.capacity, pages=self._pages)

    def resize(self, *, slots: int, capacity: int, pages: PageTable | None = None) -> None:
        """Empty slots; the old ones' memory is given back first."""
        super().resize(slots=slots, capacity=capacity, pages=pages)
        self._recurrent = {
            index: RecurrentSlots(self._shape, slots=slots, block=self._block, like=self._states)
            for index in self._linear
        }

    def free(self) -> None:
        """No slots at all: their memory is given back."""
        super().free()
        self._recurrent = {}

    def layer(self, index: int) -> LayerCache:
        """One layer's keys and values."""
        return super().layer(self._places[index])

    def recurrent(self, index: int) -> RecurrentSlots:
        """One layer's states."""
        return self._recurrent[index]

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """States after the anchor and the accepted drafts [n] of the last forward in slots [n]."""
        for layer in self._recurrent.values():
            layer.commit(slots, accepted + 1)

    def copy(self, source: int, goal: int, count: int) -> None:
        """Refused: a state is of all its slot's tokens."""
        raise TargetError(
            f"the first {count} tokens of slot {source} are to be copied to slot {goal}, but "
            "linear-attention layers keep one state of all tokens. Make the engine without `reuse`."
        )

    def compact(self, slots: Tensor, starts: Tensor, path: Tensor) -> None:  # noqa: ARG002
        """Refused: branches would mix in one state."""
        raise TargetError(
            "a tree was verified, but linear-attention layers follow one text. Draft chains "
            "(tree=0)."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return super().nbytes + sum(layer.nbytes for layer in self._recurrent.values())
