"""How many rows, and how long: admission by memory, decided once when the server starts."""

from __future__ import annotations

from dataclasses import dataclass

from domino_spec.engine.sizes import MOST_DRAFTING, Size
from domino_spec.errors import InputError
from domino_spec.serving.settings import ServerSettings

_CPU_SLOTS = 8
"""A CPU is busy with few rows: more of them only share it."""
_LONGEST, _CPU_LONGEST = 32768, 4096
"""Where nobody says: a context of millions would leave room for nobody else."""
_SHORTEST = 512
_FEW = 4
"""So many rows at a time are worth a shorter context."""
_SHARE = 0.6
"""Of the free memory; activations, prompts and the rest of the machine want some too."""


@dataclass(frozen=True)
class Limits:
    """What one answer may take."""

    context: int
    """Prompt and answer."""
    max_prompt_tokens: int
    max_new_tokens: int


def context_of(settings: ServerSettings, context: int | None) -> int | None:
    """What the settings name, if the target was made for as much; else the target's own."""
    if settings.context is not None and context is not None and settings.context > context:
        raise InputError(
            f"context is {settings.context}; the target was made for {context}. Ask for less."
        )
    return settings.context or context


def size_of(
    settings: ServerSettings,
    *,
    on_gpu: bool,
    context: int | None,
    token_bytes: int,
    free: int | None,
) -> Size:
    """Slots that the free bytes hold: fewer of them first, then shorter ones.

    What the settings name is kept, or refused where it cannot be had.
    """
    asked = context_of(settings, context)
    longest = _LONGEST if on_gpu else _CPU_LONGEST
    capacity = settings.context or min(asked or longest, longest)
    most = settings.slots or (MOST_DRAFTING if on_gpu else _CPU_SLOTS)
    if free is None:
        return Size(most, capacity)
    room = int(_SHARE * free) // token_bytes  # tokens
    if settings.context is None:
        least = settings.slots or min(most, _FEW)
        while (least + 1) * capacity > room and capacity > _SHORTEST:
            capacity = max(capacity // 2, _SHORTEST)
    slots = most
    while settings.slots is None and slots > 1 and (slots + 1) * capacity > room:
        slots -= 1
    if (slots + 1) * capacity > room:
        taken = (slots + 1) * capacity * token_bytes
        raise InputError(
            f"{slots} slots of {capacity} tokens take {taken / 1e9:.1f} GB of memory; "
            f"{_SHARE * free / 1e9:.1f} GB are there for them. Ask for fewer slots or a shorter "
            "context."
        )
    return Size(slots, capacity)


def limits_of(settings: ServerSettings, capacity: int) -> Limits:
    """The settings', as far as a slot holds them."""
    return Limits(
        context=capacity,
        max_prompt_tokens=min(settings.max_prompt_tokens or capacity, capacity - 1),
        max_new_tokens=min(settings.max_new_tokens or capacity, capacity - 1),
    )
