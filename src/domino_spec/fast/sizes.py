"""How many slots, and how long: what the rows of a run want, and what the memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from domino_spec.decoding import Row
from domino_spec.drafter import Drafter
from domino_spec.fast.families import read_shape
from domino_spec.targets import Target

MOST_SLOTS = 64
"""More rows than this take turns: the engine fills batches up to so many."""
_FIRST_CAPACITY = 1024
_SHARE = 0.5
"""Of the free memory, what slots may take for comfort; activations and the caller want the rest."""
_LAST_SHARE = 0.9
"""What one slot may take where there is no choice."""


@dataclass(frozen=True)
class Size:
    """Slots of an engine."""

    slots: int
    capacity: int

    def holds(self, other: Size) -> bool:
        """Whether rows that want the other size find room."""
        return self.slots >= other.slots and self.capacity >= other.capacity


def needed_capacity(rows: Sequence[Row]) -> int:
    """Tokens of the longest row, prompt and answer."""
    return max(len(row.prompt) + row.max_new_tokens for row in rows)


def size_for(rows: Sequence[Row], target: Target) -> Size:
    """Rounded up, so that the next run most likely fits too."""
    needed = needed_capacity(rows)
    capacity = max(_FIRST_CAPACITY, _power_of_two(needed))
    if target.context_length is not None:
        capacity = max(min(capacity, target.context_length), needed)
    return Size(min(_power_of_two(len(rows)), MOST_SLOTS), capacity)


def fitting(wanted: Size, present: Size | None, needed: int, *, row: int, free: int) -> Size | None:
    """The first of ever smaller sizes that the free bytes hold, at `row` bytes a token.

    None if not even one slot of `needed` tokens fits.
    """
    for size in _ever_smaller(wanted, present):
        if _bytes(size, row) <= _SHARE * free:
            return size
    last = Size(1, needed)
    return last if _bytes(last, row) <= _LAST_SHARE * free else None


def _ever_smaller(wanted: Size, present: Size | None) -> Iterator[Size]:
    if present is not None:
        slots = max(wanted.slots, present.slots)
        yield Size(slots, max(wanted.capacity, present.capacity))
    slots = wanted.slots
    while slots >= 1:
        yield Size(slots, wanted.capacity)
        slots //= 2


def _bytes(size: Size, row: int) -> int:
    return (size.slots + 1) * size.capacity * row  # one slot is for rows that fill up a batch


def token_bytes(target: Target, drafter: Drafter | None) -> int:
    """Keys and values of one token in all layers of both models."""
    shape = read_shape(target.config)
    numbers = target.num_layers * shape.kv_heads * shape.head_dim
    if drafter is not None:
        config = drafter.config
        numbers += config.num_layers * config.num_kv_heads * config.head_dim
    return 2 * numbers * target.dtype.itemsize


def packed_bytes(target: Target, drafter: Drafter | None) -> int:
    """What packed copies of all matrices take."""
    models: list[nn.Module] = [target.model] if drafter is None else [target.model, drafter]
    layers = (layer for model in models for layer in model.modules())
    return sum(layer.weight.nbytes for layer in layers if isinstance(layer, nn.Linear))


def free_bytes(device: torch.device) -> int | None:
    """Memory nobody uses; None where nobody can tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept - graph_bytes(device))
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def graph_bytes(device: torch.device) -> int:
    """Memory that captured graphs write into while they run, which counts as nobody's."""
    number = torch.cuda.current_device() if device.index is None else device.index
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = (s for s in segments if s["device"] == number and tuple(s["segment_pool_id"]) != (0, 0))
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in pools)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
