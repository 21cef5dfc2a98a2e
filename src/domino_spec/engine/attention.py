"""Attention over slot caches as a layer calls it: which tokens a forward computes, and over what.

On a GPU it is two kernels (`kernels.rotate`, `kernels.attention`). On a CPU, where half of a small
model's step is the cost of starting operations, lengths can be read for nothing: what all layers
share is computed once, and sequences in neighbouring slots attend together, over a view of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from domino_spec.drafter.masks import Window
from domino_spec.drafter.tree import ancestor_mask
from domino_spec.engine.cache import LayerCache, pages_of
from domino_spec.engine.kernels import runtime
from domino_spec.engine.kernels.attention import (
    Masks,
    added,
    attend,
    kernels_take,
    mix,
    visible,
    visible_to,
)
from domino_spec.engine.kernels.pointwise import torch_rms_norm
from domino_spec.engine.kernels.rotate import rotate_and_store, store
from domino_spec.engine.kernels.runtime import on_host
from domino_spec.quantization.compiled import kernel
from domino_spec.quantization.rows import KeyRanges
from domino_spec.quantization.rows import attend as attend_rows

if TYPE_CHECKING:
    from domino_spec.engine.models.base import Shape


_CALL_BYTES = 1 << 19
"""Keys and values that a CPU reads in the time that starting one more attention call takes."""


@dataclass(frozen=True)
class Ragged:
    """Sequences with different numbers of new tokens, which lie one after the other."""

    slots: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    offsets: Tensor  # [sequences + 1]: where each one's new tokens begin
    rows: Tensor  # [tokens]: whose token it is
    steps: Tensor  # [tokens]: its place among its sequence's new ones
    count: int
    """The most new tokens that a sequence can have."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Sequences of a forward: their slots, what these hold already, and their new tokens.

    New token i of a sequence goes to place starts + i of its slot. That is its position too, unless
    `positions` says another (at most its place); it sees the slot's old tokens, and of the new ones
    those that the layer's causality says, or `ancestors`: a tree of drafts is one forward.
    Tokens of `ragged` sequences stand for themselves here: each is one of one new token, and sees
    those of its sequence before it, which are stored first.
    """

    slots: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    count: int
    """New tokens a sequence."""
    longest: int | None = None
    """A bound on starts + count, where the caller knows one."""
    positions: Tensor | None = None  # [sequences, count]
    ancestors: Tensor | None = None  # [sequences, count] int64: bit j says that it sees token j
    paths: Tensor | None = None  # [sequences, count, count]: the same tokens in order, for kernels
    ragged: Ragged | None = None
    ends: Tensor | None = None
    """Of prompts, all of whose tokens stay: where each one's last token is among all tokens of the
    forward, [sequences]; what follows it is padding. None where `commit` says what stays."""
    _host: dict[int, HostMetadata] = field(default_factory=dict, compare=False)
    _alone: dict[tuple[int, int], PerTokenMetadata] = field(default_factory=dict, compare=False)
    _pages: dict[bool, Tensor] = field(default_factory=dict, compare=False)
    masks: Masks = field(default_factory=dict, compare=False)
    """What prompts' attention reads; made once for all layers."""

    def pages(self, table: Tensor | None, *, ragged: bool = False) -> Tensor:
        """Where each sequence's tokens lie, [sequences, pages]; looked up once for all layers.

        With `ragged` those of the sequences that the ones here are tokens of.
        """
        if ragged not in self._pages:
            own = self.ragged.slots if ragged and self.ragged is not None else self.slots
            self._pages[ragged] = pages_of(own, table)
        return self._pages[ragged]

    @cached_property
    def kept(self) -> Tensor | None:
        """How many new tokens of each sequence stay, [sequences], where that is known."""
        if self.ends is None:
            return None
        rows = torch.arange(len(self.ends), device=self.ends.device)
        return self.ends + 1 - rows * self.count

    def on_host(self, rotary: tuple[Tensor, Tensor], dtype: torch.dtype) -> HostMetadata:
        """Computed for the first layer of a model (each has a table of its own) and kept."""
        key = id(rotary[0])
        if key not in self._host:
            self._host[key] = HostMetadata(self, rotary, dtype)
        return self._host[key]

    def per_token(self, capacity: int, table: int) -> PerTokenMetadata:
        """The same, for a cache and a rotary table of this size."""
        key = (capacity, table)
        if key not in self._alone:
            self._alone[key] = PerTokenMetadata(self, capacity, table)
        return self._alone[key]


def run_attention(
    qkv: Tensor,  # [sequences * count, (heads + 2 * kv heads) * head_dim]
    cache: LayerCache,
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
    *,
    q_norm: Tensor | None = None,  # [head_dim]
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,  # [heads]
    causal: bool,
    window: Window | None = None,
) -> Tensor:
    """Keys and values stored, then attention over cache and new tokens: [tokens, width]."""
    batch, (keys, values, table) = len(metadata.slots), cache
    if shape.batch_invariant:
        assert sinks is None, "no such target is loaded with quantised weights"
        return _attend_per_token(
            qkv, cache, rotary, metadata, shape, norms=(q_norm, k_norm), causal=causal,
            window=window,
        )  # fmt: skip
    if table is None and _attends_over_views(qkv, shape):
        host = metadata.on_host(rotary, qkv.dtype)
        heads = qkv.view(batch, metadata.count, -1, shape.head_dim)
        both, value = torch.split(heads, [shape.heads + shape.kv_heads, shape.kv_heads], dim=2)
        assert (q_norm is None) == (k_norm is None)
        if q_norm is not None and k_norm is not None:
            query, key = torch.split(both, [shape.heads, shape.kv_heads], dim=2)
            query = torch_rms_norm(query, q_norm, shape.eps)
            key = torch_rms_norm(key, k_norm, shape.eps)
            both = torch.cat((query, key), dim=2)
        query, key = torch.split(host.rotated(both), [shape.heads, shape.kv_heads], dim=2)
        host.write((keys, values), key, value)
        return host.attend(
            query, keys, values, causal=causal, window=window, scale=shape.scale, sinks=sinks
        ).flatten(0, 1)
    pages = metadata.pages(table)
    query = rotate_and_store(
        qkv.view(batch, metadata.count, -1), *rotary, keys, values, pages, metadata.starts,
        heads=shape.heads, q_norm=q_norm, k_norm=k_norm, eps=shape.eps,
        positions=metadata.positions,
    )  # fmt: skip
    ragged_pages = None if metadata.ragged is None else metadata.pages(table, ragged=True)
    return attend(
        query, keys, values, pages, metadata.starts,
        causal=causal, window=window, scale=shape.scale, longest=metadata.longest,
        positions=metadata.positions, ancestors=metadata.ancestors, paths=metadata.paths,
        ragged=metadata.ragged, ragged_pages=ragged_pages, sinks=sinks, masks=metadata.masks,
    ).flatten(0, 1)  # fmt: skip


def _attend_per_token(
    qkv: Tensor,  # [sequences * count, (heads + 2 * kv heads) * head_dim]
    cache: LayerCache,
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
    *,
    norms: tuple[Tensor | None, Tensor | None],
    causal: bool,
    window: Window | None,
) -> Tensor:
    """Each token alone, over the very keys it sees: [tokens, heads * head_dim].

    So its bits do not depend on what else a forward computes. Quantised weights need that: they
    round what they read, and one bit may move a number to the next level.
    """
    keys, values, table = cache
    assert table is None, "on a CPU a slot is one stretch"
    tokens = metadata.per_token(keys.shape[2], len(rotary[0]))
    compiled = kernel()
    assert compiled is not None, "without it targets are loaded in float32"
    query = compiled.rotate(qkv, (keys, values), rotary, norms, shape.eps, tokens.places)
    return attend_rows(query, keys, values, tokens.seen(causal, window), shape.scale)


def store_context(
    kv: Tensor,  # [sequences * count, layers * 2 * kv heads * head_dim]: each layer's keys, values
    k_norm: Tensor | None,  # [layers, head_dim]
    cache: LayerCache,  # of all layers
    rotary: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    shape: Shape,
) -> None:
    """Keys and values alone into all layers' caches: what a drafter's context is made of."""
    keys, values, table = cache
    layers = len(keys)
    whole = kv.view(len(metadata.slots), metadata.count, layers, -1)
    if table is not None or not _attends_over_views(kv, shape):
        place = (*rotary, keys, values, metadata.pages(table), metadata.starts)
        store(whole, *place, k_norm=k_norm, eps=shape.eps, positions=metadata.positions)
        return
    heads = whole.view(*whole.shape[:3], -1, shape.head_dim)
    host = metadata.on_host(rotary, kv.dtype)
    for layer in range(layers):
        key, value = heads[:, :, layer].chunk(2, dim=2)
        if k_norm is not None:
            key = torch_rms_norm(key, k_norm[layer], shape.eps)
        host.write((keys[layer], values[layer]), host.rotated(key), value)


def _attends_over_views(states: Tensor, shape: Shape) -> bool:
    """On a CPU; elsewhere where no kernel exists, which the reference loop's drafters may meet."""
    if states.device.type == "cpu":
        return on_host(states)
    return not kernels_take(shape.head_dim) or not (states.is_cuda or runtime.usable(states))


NO_PLACES = slice(0)


@dataclass(frozen=True)
class Group:
    """Sequences in neighbouring slots that attend in one call, over the same places of these."""

    rows: slice
    slots: slice
    places: slice
    sinks: slice
    """Places before these, which a window leaves out but for its sink tokens."""
    seen: Tensor | None  # [sequences, 1, count, places], 0 or -inf; None: all, or by causality

    def own(self, states: Tensor) -> Tensor:
        """Their part of keys or values [slots, kv heads, capacity, head_dim]."""
        near = states[self.slots, :, self.places]
        if not self.sinks.stop:
            return near
        return torch.cat((states[self.slots, :, self.sinks], near), dim=2)


class Spans:
    """Sequences whose lengths are on the host: they attend over views of their slots."""

    def __init__(
        self,
        slots: Tensor,  # [sequences]
        starts: Tensor,
        count: int,
        positions: Tensor | None = None,  # [sequences, count]
        ancestors: Tensor | None = None,  # [sequences, count]
    ) -> None:
        self.count = count
        self._slots, self._starts = slots, starts
        self._given = (positions, None if ancestors is None else ancestor_mask(ancestors))
        self._plain = positions is None and ancestors is None
        self.spans = list(zip(slots.tolist(), starts.tolist(), strict=True))
        self._groups: dict[tuple[bool, Window | None], list[Group]] = {}

    def attend(
        self,
        query: Tensor,  # [sequences, count, heads, head_dim]
        keys: Tensor,  # [slots, kv heads, capacity, head_dim]
        values: Tensor,
        *,
        causal: bool,
        window: Window | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[sequences, count, heads * head_dim], by the rule of `kernels.attention.attend`."""
        if (causal, window) not in self._groups:
            self._groups[causal, window] = [
                self._group(rows, query, keys, causal=causal, window=window)
                for rows in self._neighbours(query, keys)
            ]
        mixed = []
        for group in self._groups[causal, window]:
            # A prompt of several tokens that sees by causality alone has nothing before it.
            empty = group.seen is None and causal and self.count > 1
            own = group.own(keys), group.own(values)
            given = (query[group.rows], *own, group.seen, scale)
            mixed.append(mix(*given, empty=empty, sinks=sinks))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(2)

    def _neighbours(self, query: Tensor, keys: Tensor) -> list[slice]:
        """Sequences that follow each other in slots too, as far as padding costs less than calls.

        A call reads as much of each of its slots as the longest of its sequences needs.
        """
        # Many queries a key: what counts is no longer reading it, but multiplying.
        queries = self.count * query.shape[2] // keys.shape[1]
        place_bytes = 2 * keys.shape[1] * keys.shape[3] * keys.element_size()
        spare = _CALL_BYTES / (place_bytes * (1 + queries / 16))  # places, instead of a call
        groups: list[slice] = []
        longest = 0  # of the last group
        for row, (slot, start) in enumerate(self.spans):
            length, size = start + self.count, row - groups[-1].start if groups else 0
            more = max(longest - length, (length - longest) * size)
            if groups and slot == self.spans[row - 1][0] + 1 and more <= spare:
                groups[-1] = slice(groups[-1].start, row + 1)
                longest = max(longest, length)
            else:
                groups.append(slice(row, row + 1))
                longest = length
        return groups

    def _group(
        self, rows: slice, query: Tensor, keys: Tensor, *, causal: bool, window: Window | None
    ) -> Group:
        """Where these sequences' keys lie, and which of them each new token sees."""
        spans = self.spans[rows]
        slots = slice(spans[0][0], spans[-1][0] + 1)
        own = [start for _, start in spans]
        end = min(max(own) + self.count, keys.shape[2])
        if self._plain and window is None and min(own) == max(own):
            sees_all = self.count == 1 or not causal
            if sees_all or (own[0] == 0 and end == self.count):
                return Group(rows, slots, slice(end), NO_PLACES, None)
        starts = self._starts[rows]
        positions, mask = (None if each is None else each[rows] for each in self._given)
        first, sinks = 0, NO_PLACES
        if self._plain:
            if window is not None:
                first = min(max(min(own) - window.size + 1, 0), end - 1)
                if window.sink_tokens >= first:
                    first = 0
                sinks = slice(min(window.sink_tokens, first))
            places = torch.arange(end, device=starts.device)
            places = torch.cat((places[sinks], places[first:]))
            seen = visible(starts, self.count, places, causal, window)
        else:
            seen = visible_to(starts, self.count, end, causal, window, positions, mask)
        return Group(rows, slots, slice(first, end), sinks, added(seen, query.dtype))


class PerTokenMetadata:
    """Where new tokens go and what they see, for a model that computes each alone.

    By Python's numbers: a step has few tokens, and each operation of PyTorch's takes as long as ten
    of them.
    """

    def __init__(self, metadata: AttentionMetadata, capacity: int, table: int) -> None:
        self._count, self._capacity = metadata.count, capacity
        self._slots, self._starts = metadata.slots.tolist(), metadata.starts.tolist()
        own = None if metadata.positions is None else metadata.positions.tolist()
        self.places = torch.tensor(
            [
                (
                    slot,
                    start + step,
                    min(start + step if own is None else own[row][step], table - 1),
                )
                for row, (slot, start) in enumerate(zip(self._slots, self._starts, strict=True))
                for step in range(metadata.count)
            ],
            device=metadata.slots.device,
        )  # [tokens, 3]
        self._mask = None if metadata.ancestors is None else ancestor_mask(metadata.ancestors)
        self._seen: dict[tuple[bool, Window | None], KeyRanges] = {}

    def seen(self, causal: bool, window: Window | None) -> KeyRanges:
        """The old tokens, and of the new ones those up to itself or on its branch, or all.

        A window limits them as `drafter.masks` says.
        """
        if (causal, window) not in self._seen:
            self._seen[causal, window] = self._find(causal, window)
        return self._seen[causal, window]

    def _find(self, causal: bool, window: Window | None) -> KeyRanges:
        spans, extras = [], []
        for token in range(len(self.places)):
            row, step = divmod(token, self._count)
            slot, start, branch, sinks = self._slots[row], self._starts[row], [], range(0)
            place = start + step
            if self._mask is None:
                reach = place + 1 if causal else start + self._count
                if not causal and window is not None:
                    reach = min(reach, place + window.size)
                end = min(reach, self._capacity)
            else:  # its tokens are in the order of their positions
                own = self._mask[row, step].nonzero()[:, 0].tolist()
                branch = [start + each for each in own if start + each < self._capacity]
                end = min(start, self._capacity)
            first = 0
            if window is not None:
                assert not (branch and window.sink_tokens), "targets' windows have no sinks"
                branch = branch[-window.size :]
                newest = end + len(branch) if causal else place + 1
                first = min(max(newest - window.size, 0), end)
                if window.sink_tokens >= first:
                    first = 0
                sinks = range(min(window.sink_tokens, first))
            spans.append((slot, first, end))
            extras.append([*sinks, *branch])
        return KeyRanges.of(spans, extras)


class HostMetadata(Spans):
    """What all layers of a model need to know of its sequences: spans, masks and angles."""

    def __init__(
        self, metadata: AttentionMetadata, rotary: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__(
            metadata.slots, metadata.starts, metadata.count, metadata.positions, metadata.ancestors
        )
        self._ragged = metadata.ragged
        if (ragged := metadata.ragged) is not None:
            self._whole = Spans(ragged.slots, ragged.starts, ragged.count)
        cos, sin = rotary
        steps = torch.arange(metadata.count, device=metadata.starts.device)
        self._places = metadata.starts.unsqueeze(1) + steps  # [sequences, count]
        self._end = max((start for _, start in self.spans), default=0) + metadata.count
        positions = self._places if metadata.positions is None else metadata.positions
        places = positions.clamp(max=len(cos) - 1)
        self.cos = cos[places].to(dtype).unsqueeze(2)  # [sequences, count, 1, rotated part]
        # Half of that part is turned by the negative sine: the sign is put in here.
        half = cos.shape[1] // 2
        signed = torch.cat((-sin[places][..., :half], sin[places][..., half:]), dim=-1)
        self.sin = signed.to(dtype).unsqueeze(2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, **how: Any) -> Tensor:
        """Ragged tokens attend in blocks of one length: keys and values are read once for each."""
        if (ragged := self._ragged) is None:
            return super().attend(query, keys, values, **how)
        blocks = query.new_zeros(len(ragged.slots), ragged.count, *query.shape[2:])
        blocks[ragged.rows, ragged.steps] = query[:, 0]
        mixed = self._whole.attend(blocks, keys, values, **how)
        return mixed[ragged.rows, ragged.steps].unsqueeze(1)

    def rotated(self, states: Tensor) -> Tensor:
        """Rotary positions on [sequences, count, heads, head_dim]."""
        width = self.cos.shape[-1]
        if width < states.shape[-1]:
            return torch.cat((self.rotated(states[..., :width]), states[..., width:]), dim=-1)
        turned = states.roll(width // 2, dims=-1)
        return (states * self.cos).addcmul_(turned, self.sin)

    def write(
        self,
        cache: tuple[Tensor, Tensor],
        key: Tensor,  # [sequences, count, kv heads, head_dim]
        value: Tensor,
    ) -> None:
        """Keys and values into the caches, as far as these reach."""
        for states, new in zip(cache, (key, value), strict=True):
            slots, places = self._slots.unsqueeze(1), self._places
            if self._end > states.shape[2]:
                inside = places < states.shape[2]
                slots, places, new = slots.expand_as(places)[inside], places[inside], new[inside]
            states.transpose(1, 2).index_put_((slots, places), new)
