"""What a cycle costs: seconds by batch size and depth, and what sampling and the like add."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

Seconds = Mapping[int, Mapping[int, float]]
"""By batch size and by depth."""


@dataclass(frozen=True)
class Costs:
    """Measured for some batch sizes, interpolated linearly between them."""

    cycles: Seconds
    """Of cycles in which every sequence is greedy and nothing else is asked for."""
    extras: Mapping[str, Seconds] = field(default_factory=dict)
    """What a kind of cycle adds, by the kind's name; interpolated between depths too.

    Kinds add up: a cycle that samples and penalises pays for both.
    """

    def __post_init__(self) -> None:
        if not self.cycles:
            raise ValueError("costs need at least one batch size; none was given")

    @property
    def largest_batch(self) -> int:
        """The largest batch size that was measured."""
        return max(self.cycles)

    def of(self, size: int, kinds: Collection[str] = ()) -> dict[int, float]:
        """Seconds by depth; beyond the batch sizes that were measured, those of the nearest."""
        lower, upper = _around(self.cycles, size)
        wanted = self.cycles[lower].keys() & self.cycles[upper].keys()
        extras = [self.extras[kind] for kind in kinds if kind in self.extras]
        return rising({
            depth: _at({n: self.cycles[n][depth] for n in (lower, upper)}, size)
            + sum(_at({n: _at(each[n], depth) for n in each}, size) for each in extras)
            for depth in wanted
        })  # fmt: skip


def rising(costs: Mapping[int, float]) -> dict[int, float]:
    """A cycle costs no more than a deeper one, which does all its work and more.

    What a busy moment added to a measurement that is kept for good would count for ever.
    """
    found: dict[int, float] = {}
    least = math.inf
    for depth in sorted(costs, reverse=True):
        least = min(least, costs[depth])
        found[depth] = least
    return dict(sorted(found.items()))


def _at(points: Mapping[int, float], place: int) -> float:
    """The value on the line between the two points around a place; outside, the nearest one's."""
    lower, upper = _around(points, place)
    if lower == upper:
        return points[lower]
    if math.inf in (points[lower], points[upper]):
        return math.inf
    share = (place - lower) / (upper - lower)
    return points[lower] + share * (points[upper] - points[lower])


def _around(points: Collection[int], place: int) -> tuple[int, int]:
    """The points next to a place; twice the same where it is one, or lies outside."""
    known = sorted(points)
    index = bisect_left(known, place)
    if index == len(known):
        return known[-1], known[-1]
    lower = known[max(index - 1, 0)] if known[index] != place else place
    return lower, known[index]
