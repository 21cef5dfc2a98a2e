"""Attention over slot caches as a layer calls it: which tokens a forward computes, and over what.

On a GPU it is two kernels (`kernels.rotate`, `kernels.attention`). On a CPU, where half of a small
model's step is the cost of starting operations, lengths can be read for nothing: what all layers
share is computed once, and each sequence attends over a view of its own slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels import runtime
from domino_spec.engine.kernels.attention import attend, kernels_take, mix, visible, visible_to
from domino_spec.engine.kernels.rotate import rotate_and_store, store
from domino_spec.engine.kernels.runtime import on_host

if TYPE_CHECKING:
    from domino_spec.engine.models.base import Shape


@dataclass(frozen=True)
class AttentionMetadata:
    """Sequences of a forward: their slots, what these hold already, and their new tokens.

    New token i of a sequence goes to place starts + i of its slot. That is its position too, unless
    `positions` says another (at most its place); it sees the slot's old tokens, and of the new ones
    those that the layer's causality says, or `mask`: a tree of drafts is one forward.
    """

    slots: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    count: int
    """New tokens a sequence."""
    longest: int | None = None
    """A bound on starts + count, where the caller knows one."""
    positions: Tensor | None = None  # [sequences, count]
    mask: Tensor | None = None  # [sequences, count, count] bool: who of the new tokens sees whom
    mask_bits: Tensor | None = None  # [sequences, count] int64: the same, as kernels take it
    _host: dict[int, HostMetadata] = field(default_factory=dict, compare=False)

    def on_host(self, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> HostMetadata:
        """Computed for the first layer of a model (each has a table of its own) and kept."""
        key = id(rotary[0])
        if key not in self._host:
            self._host[key] = HostMetadata(self, rotary, dtype)
        return self._host[key]


def run_attention(
    qkv: Tensor,  # [sequences * count, (heads + 2 * kv heads) * head_dim]
    cache: tuple[Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
    *,
    q_norm: Tensor | None = None,  # [head_dim]
    k_norm: Tensor | None = None,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Keys and values stored, then attention over cache and new tokens: [tokens, width]."""
    batch, keys, values = len(metadata.slots), *cache
    if _attends_over_views(qkv, shape):
        host = metadata.on_host(rotary, qkv.dtype)
        heads = qkv.view(batch, metadata.count, -1, shape.head_dim)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        query, key, value = torch.split(heads, sizes, dim=2)
        if q_norm is not None:
            query = F.rms_norm(query, (shape.head_dim,), q_norm, shape.eps)
        query = host.rotated(query)
        host.write(cache, key, value, k_norm, shape.eps)
        return host.attend(
            query, keys, values, causal=causal, window=window, scale=shape.scale
        ).flatten(0, 1)
    query = rotate_and_store(
        qkv.view(batch, metadata.count, -1), *rotary, keys, values, metadata.slots,
        metadata.starts, heads=shape.heads, q_norm=q_norm, k_norm=k_norm, eps=shape.eps,
        positions=metadata.positions,
    )  # fmt: skip
    return attend(
        query, keys, values, metadata.slots, metadata.starts,
        causal=causal, window=window, scale=shape.scale, longest=metadata.longest,
        positions=metadata.positions, mask=metadata.mask, mask_bits=metadata.mask_bits,
    ).flatten(0, 1)  # fmt: skip


def store_context(
    kv: Tensor,  # [sequences * count, layers * 2 * kv heads * head_dim]: each layer's keys, values
    k_norm: Tensor | None,  # [layers, head_dim]
    cache: tuple[Tensor, Tensor],  # of all layers
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
) -> None:
    """Keys and values alone into all layers' caches: what a drafter's context is made of."""
    keys, values = cache
    layers = len(keys)
    whole = kv.view(len(metadata.slots), metadata.count, layers, -1)
    if not _attends_over_views(kv, shape):
        place = (*rotary, keys, values, metadata.slots, metadata.starts)
        store(whole, *place, k_norm=k_norm, eps=shape.eps, positions=metadata.positions)
        return
    heads = whole.view(*whole.shape[:3], -1, shape.head_dim)
    host = metadata.on_host(rotary, kv.dtype)
    for layer in range(layers):
        key, value = heads[:, :, layer].chunk(2, dim=2)
        norm = None if k_norm is None else k_norm[layer]
        host.write((keys[layer], values[layer]), key, value, norm, shape.eps)


def _attends_over_views(states: Tensor, shape: Shape) -> bool:
    """On a CPU; elsewhere where no kernel exists, which the reference loop's drafters may meet."""
    if states.device.type == "cpu":
        return on_host(states)
    return not kernels_take(shape.head_dim) or not (states.is_cuda or runtime.usable(states))


class Spans:
    """Sequences whose lengths are on the host: each attends over a view of its own slot."""

    def __init__(
        self,
        slots: Tensor,  # [sequences]
        starts: Tensor,
        count: int,
        positions: Tensor | None = None,  # [sequences, count]
        mask: Tensor | None = None,  # [sequences, count, count]
    ) -> None:
        self.count = count
        self._device = slots.device
        self._given = None if positions is None and mask is None else (starts, positions, mask)
        self.spans = list(zip(slots.tolist(), starts.tolist(), strict=True))
        self._seen: dict[tuple[int, bool, int | None], tuple[int, Tensor | None]] = {}

    def attend(
        self,
        query: Tensor,  # [sequences, count, heads, head_dim]
        keys: Tensor,  # [slots, kv heads, capacity, head_dim]
        values: Tensor,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """[sequences, count, heads * head_dim], by the rule of `kernels.attention.attend`."""
        mixed, plain = [], causal and window is None and self._given is None
        for row, (slot, start) in enumerate(self.spans):
            end = min(start + self.count, keys.shape[2])
            first, seen = self._sees(row, end, causal=causal, window=window)
            mixed.append(
                mix(
                    query[row : row + 1],
                    keys[slot : slot + 1, :, first:end],
                    values[slot : slot + 1, :, first:end],
                    seen,
                    scale,
                    empty=plain and start == 0 and end == self.count,
                )
            )
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(2)

    def _sees(
        self, row: int, end: int, *, causal: bool, window: int | None
    ) -> tuple[int, Tensor | None]:
        """The first place of the slot that new tokens see, and which of the rest each sees."""
        key = (row, causal, window)
        if key not in self._seen and self._given is not None:
            own = [None if each is None else each[row : row + 1] for each in self._given]
            starts, positions, mask = own
            assert starts is not None
            seen = visible_to(starts, self.count, end, causal, window, positions, mask)
            self._seen[key] = (0, seen[0])
        if key not in self._seen:
            start = self.spans[row][1]
            first = 0 if window is None else min(max(start - window + 1, 0), end - 1)
            mask = None
            if window is not None or (causal and self.count > 1):
                positions = torch.arange(start, start + self.count, device=self._device)
                places = torch.arange(first, end, device=self._device)
                mask = visible(positions, places, causal, window)
            self._seen[key] = (first, mask)
        return self._seen[key]


class HostMetadata(Spans):
    """What all layers of a model need to know of its sequences: spans, masks and angles."""

    def __init__(
        self, metadata: AttentionMetadata, rotary: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(
            metadata.slots, metadata.starts, metadata.count, metadata.positions, metadata.mask
        )
        cos, sin = rotary
        positions = metadata.positions
        if positions is None:
            steps = torch.arange(metadata.count, device=metadata.starts.device)
            positions = metadata.starts.unsqueeze(1) + steps
        places = positions.clamp(max=len(cos) - 1)
        self.cos = cos[places].to(dtype).unsqueeze(2)  # [sequences, count, 1, head_dim]
        # Half of a head is turned by the negative sine: the sign is put in here.
        half = cos.shape[1] // 2
        signed = torch.cat((-sin[places][..., :half], sin[places][..., half:]), dim=-1)
        self.sin = signed.to(dtype).unsqueeze(2)

    def rotated(self, states: Tensor) -> Tensor:
        """Rotary positions on [sequences, count, heads, head_dim]."""
        turned = states.roll(states.shape[-1] // 2, dims=-1)
        return (states * self.cos).addcmul_(turned, self.sin)

    def write(
        self,
        cache: tuple[Tensor, Tensor],
        key: Tensor,  # [sequences, count, kv heads, head_dim], not yet normed or rotated
        value: Tensor,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        """Keys and values into the caches, as far as these reach."""
        if k_norm is not None:
            key = F.rms_norm(key, (key.shape[-1],), k_norm, eps)
        for states, new in ((cache[0], self.rotated(key)), (cache[1], value)):
            capacity = states.shape[2]
            for row, (slot, start) in enumerate(self.spans):
                room = max(min(self.count, capacity - start), 0)
                states[slot, :, start : start + room] = new[row, :room].transpose(0, 1)
