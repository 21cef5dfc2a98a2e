"""The target's KV cache with a length per sequence and exact rollback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from domino_spec.errors import TargetError
from domino_spec.targets.recurrent import RecurrentStates
from domino_spec.targets.support import linear_layers


def growing_cache(config: Any) -> DynamicCache:
    """Transformers' empty cache without windows: a layer keeps all its keys and values, or states.

    Without a configuration every layer would be a plain growing one, with it some have windows.
    """
    linear = linear_layers(config)
    if not linear:
        return DynamicCache()
    past = DynamicCache(config=config)
    for index in set(range(len(past.layers))) - set(linear):
        past.layers[index] = DynamicLayer()
    return past


class TargetCache:
    """Row i owns slots 0..lengths[i]-1 of every layer; later slots are garbage to be masked.

    A forward appends its tokens after the last slot for all sequences alike. `commit` then moves
    what each sequence keeps to its own end and cuts the rest off. Sliding-window layers
    keep every slot too, so that nothing a roll-back needs is ever dropped: the mask applies
    the window. Linear-attention layers have no slots: `RecurrentStates` rolls them back.
    """

    def __init__(self, batch: int, config: Any, recurrent: Mapping[int, nn.Module]) -> None:
        """`recurrent` are the modules of the configuration's linear-attention layers."""
        self.past = growing_cache(config)
        self.lengths = [0] * batch
        self.rope_deltas = [0] * batch
        """What M-RoPE adds to the positions of the tokens after each sequence's images."""
        self._linear = frozenset(recurrent)
        self._states = RecurrentStates(self.past, recurrent) if recurrent else None

    @property
    def slots(self) -> int:
        """Slots in use by the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def ragged(self) -> bool:
        """Whether some sequence is shorter than the cache, so that a mask must hide its garbage."""
        return any(length != self.slots for length in self.lengths)

    def forwarding(self, count: int, *, rollback: bool) -> AbstractContextManager[None]:
        """A forward that appends so many tokens; without `rollback` all of them are committed."""
        if self._states is None:
            return nullcontext()  # keys and values are cut afterwards
        return self._states.forwarding(count, rollback=rollback)

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[i]` of the positions the last forward appended."""
        start = self.slots
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        # All that must move do so at once: plain decoding of sequences of different lengths comes
        # here for every token.
        moves = [
            (index, start + offset, length + offset)
            for index, (length, count) in enumerate(zip(self.lengths, counts, strict=True))
            for offset in range(count if length != start else 0)
        ]
        places: dict[torch.device, Tensor] = {}
        for layer in self._layers():
            for states in (layer.keys, layer.values) if moves else ():
                if states.device not in places:
                    places[states.device] = torch.tensor(moves, device=states.device).T
                moved, found, wanted = places[states.device]
                states[moved, :, wanted] = states[moved, :, found]  # read whole before written
            size = max(lengths)
            layer.keys = layer.keys[:, :, :size]
            layer.values = layer.values[:, :, :size]
        if self._states is not None:
            self._states.commit(counts)
        self.lengths = lengths

    def select(self, kept: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        for layer in self._layers():
            size = max(self.lengths[index] for index in kept)
            layer.keys = layer.keys[kept, :, :size]
            layer.values = layer.values[kept, :, :size]
        if self._states is not None:
            self._states.select(kept)
        self.lengths = [self.lengths[index] for index in kept]
        self.rope_deltas = [self.rope_deltas[index] for index in kept]

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Absolute positions of the next `count` tokens of every sequence, [batch, count]."""
        starts = torch.tensor(self.lengths, device=device).unsqueeze(1)
        return starts + torch.arange(count, device=device)

    def visibility(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Whom the next `count` tokens see and how far away it is, [batch, count, slots + count].

        By true positions. Transformers would compare slot numbers; after a shorter sequence's
        garbage those run ahead of the positions, which a sliding window would notice.
        """
        slots = torch.arange(self.slots, device=device)
        lengths = torch.tensor(self.lengths, device=device).unsqueeze(1)
        new = self.positions(count, device)  # [batch, count]
        hidden = torch.iinfo(torch.long).max  # a position after every query
        cached = torch.where(slots < lengths, slots, hidden)  # [batch, slots]
        keys = torch.cat((cached, new), dim=1).unsqueeze(1)
        queries = new.unsqueeze(2)
        return keys <= queries, queries - keys

    def _layers(self) -> list[Any]:
        layers = [
            layer
            for index, layer in enumerate(self.past.layers)
            if index not in self._linear and layer.is_initialized
        ]
        for layer in layers:
            if type(layer) is not DynamicLayer:
                raise TargetError(
                    f"the model put a {type(layer).__name__} into its cache; only plain growing "
                    "layers can be rolled back exactly."
                )
        return layers
