"""The one rule that tells a degenerate loop from an answer."""

from __future__ import annotations

from collections.abc import Sequence

_GRAM = 4


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether fewer than half of the 4-grams are distinct: a model repeating itself."""
    count = len(tokens) - _GRAM + 1
    if count < 1:
        return False
    ids = [int(token) for token in tokens]
    distinct = len(set(zip(*(ids[start:] for start in range(_GRAM)), strict=False)))
    return 2 * distinct < count
