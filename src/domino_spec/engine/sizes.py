"""How many slots, and how long: what waiting sequences need, and what the memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from domino_spec.decoding import Drafter
from domino_spec.decoding import Sequence as Decoded
from domino_spec.engine.kernels.attention import kernels_take
from domino_spec.engine.kernels.runtime import triton_available
from domino_spec.engine.models.base import read_shape
from domino_spec.engine.recurrent import read_delta_shape
from domino_spec.quantization import QuantizedWeight
from domino_spec.targets import Target
from domino_spec.targets.support import linear_layers

if TYPE_CHECKING:
    from domino_spec.engine.engine import Engine

MOST_DRAFTING = 256
"""Sequences with drafts at a time: a cycle verifies a whole block for each."""
MOST_PLAIN = {"cuda": 1024, "cpu": 64}
"""Sequences without drafts at a time: more gain nothing once the device is busy."""
_FIRST_CAPACITY = 1024
LEAST_TOKENS = 256
"""A slot for which there are fewer in all pages is no use."""
_SHARE = 0.5
"""Of the free memory, what slots may take for comfort; activations and the caller want the rest."""
_LAST_SHARE = 0.9
"""What one slot may take where there is no choice."""


@dataclass(frozen=True)
class Size:
    """Slots of an engine."""

    slots: int
    capacity: int
    tokens: int | None = None
    """What all slots together hold, where that is less than each one's capacity: in pages."""

    @property
    def together(self) -> int:
        """Tokens that all slots hold at a time."""
        return self.slots * self.capacity if self.tokens is None else self.tokens


def wanted_size(sequences: Sequence[Decoded], target: Target, *, drafts: bool) -> Size:
    """Rounded up, so that the next run most likely fits too."""
    needed = max(sequence.max_length for sequence in sequences)
    capacity = max(_FIRST_CAPACITY, _power_of_two(needed))
    if len(sequences) > MOST_DRAFTING:  # many at a time: no room for comfort
        capacity = -(-needed // 64) * 64
    if target.context_length is not None:
        capacity = max(min(capacity, target.context_length), needed)
    most = most_sequences(target, drafts=drafts)
    return Size(min(_power_of_two(len(sequences)), most), capacity)


def most_sequences(target: Target, *, drafts: bool) -> int:
    """Sequences at a time, if the memory holds them."""
    return MOST_DRAFTING if drafts else MOST_PLAIN[target.device.type]


def fitting_size(
    engine: Engine,
    target: Target,
    drafter: Drafter | None,
    waiting: Sequence[Decoded],
    fixed: tuple[int | None, int | None],
) -> Size | None:
    """Caches for waiting sequences that the free memory holds; None if not even one fits."""
    wanted = wanted_size(waiting, target, drafts=drafter is not None)
    wanted = Size(fixed[0] or wanted.slots, fixed[1] or wanted.capacity)
    free = free_bytes(target.device)
    if free is None:
        return wanted
    free += engine.cache_bytes  # given back before anything is taken
    present = engine.size if engine.size.slots else None
    needed = max(sequence.max_length for sequence in waiting)
    taken = {"per_token": token_bytes(target, drafter), "per_slot": slot_bytes(target, drafter)}
    return fitting(wanted, present, needed, **taken, free=free, paged=engine.page is not None)


def no_room_reason(
    engine: Engine, target: Target, drafter: Drafter | None, sequences: Sequence[Decoded]
) -> str | None:
    """Why the memory holds not even one of these at a time; None if it does."""
    needed = max(sequence.max_length for sequence in sequences)
    if engine.size.slots and engine.size.capacity >= needed:
        return None
    if fitting_size(engine, target, drafter, sequences, (None, None)) is not None:
        return None
    size = (needed * token_bytes(target, drafter) + slot_bytes(target, drafter)) / 1e9
    return f"a slot of {needed} tokens takes {size:.1f} GB of memory, which is not free"


def packs_by_default(target: Target, drafter: Drafter | None) -> bool:
    """On a CPU, if a packed copy of the weights leaves as much memory free."""
    if target.device.type != "cpu":
        return False
    free = free_bytes(target.device)
    return free is None or 2 * packed_bytes(target, drafter) <= free


def fitting(
    wanted: Size,
    present: Size | None,
    needed: int,
    *,
    per_token: int,
    free: int,
    per_slot: int = 0,
    paged: bool = False,
) -> Size | None:
    """The first of ever smaller sizes that the free bytes hold, at so many a token and a slot.

    `paged` slots may together hold less than each could. None if not even one slot of `needed`
    tokens fits.
    """
    for size in _ever_smaller(wanted, present, paged=paged):
        if _bytes(size, per_token, per_slot) <= _SHARE * free:
            return size
    last = Size(1, needed)
    return last if _bytes(last, per_token, per_slot) <= _LAST_SHARE * free else None


def _ever_smaller(wanted: Size, present: Size | None, *, paged: bool) -> Iterator[Size]:
    if present is not None:
        slots = max(wanted.slots, present.slots)
        yield Size(slots, max(wanted.capacity, present.capacity))
    slots, capacity = wanted.slots, wanted.capacity
    while slots >= 1:
        yield Size(slots, capacity)
        tokens = slots * capacity // 2
        while paged and tokens >= max(capacity, slots * LEAST_TOKENS):
            yield Size(slots, capacity, tokens)
            tokens //= 2
        slots //= 2


def _bytes(size: Size, per_token: int, per_slot: int) -> int:
    # One slot is for what fills up a batch.
    return (size.together + size.capacity) * per_token + (size.slots + 1) * per_slot


def keeps_pages(target: Target) -> bool:
    """Whether an engine's caches are in pages: on a GPU, where attention's kernels read these."""
    on_gpu = target.device.type == "cuda" and triton_available()
    rounds = isinstance(target.lm_head.weight, QuantizedWeight)
    return on_gpu and not rounds and kernels_take(read_shape(target.config).head_dim)


def token_bytes(target: Target, drafter: Drafter | None) -> int:
    """What the caches of both models hold of one token."""
    shape = read_shape(target.config)
    attending = target.num_layers - len(linear_layers(target.config))
    numbers = 2 * attending * shape.kv_heads * shape.head_dim
    numbers += 0 if drafter is None else drafter.token_width
    return numbers * target.dtype.itemsize


def slot_bytes(target: Target, drafter: Drafter | None) -> int:
    """What the target's recurrent states and the record of a block take, whatever a slot holds."""
    linear = len(linear_layers(target.config))
    if not linear:
        return 0
    block = 1 + (0 if drafter is None else drafter.depth)
    return linear * read_delta_shape(target.config).slot_bytes(block, target.dtype)


def packed_bytes(target: Target, drafter: Drafter | None) -> int:
    """What packed copies of all matrices take."""
    models: list[nn.Module] = [target.model]
    if drafter is not None and drafter.model is not None:
        models.append(drafter.model)
    layers = (layer for model in models for layer in model.modules())
    return sum(layer.weight.nbytes for layer in layers if isinstance(layer, nn.Linear))


def free_bytes(device: torch.device) -> int | None:
    """Free memory; None where the system does not tell."""
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
    """Memory that captured graphs write into while they run, not counted as allocated."""
    number = torch.cuda.current_device() if device.index is None else device.index
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pools = (s for s in segments if s["device"] == number and tuple(s["segment_pool_id"]) != (0, 0))
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in pools)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
