"""How many drafts to verify: what a cycle costs against what it is likely to commit.

A cycle costs more the more drafts it verifies, and the last of them are the least likely to be
accepted. With many rows, or on a processor that is busy with few, fewer drafts pay; sometimes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LADDER = (0, 1, 2, 3, 5, 7, 11, 15)
"""Depths worth measuring; 0 is plain decoding."""
_FORGETTING = 0.98
_PRIOR_CHANCE = 0.8
_PRIOR_WEIGHT = 4.0
_RETRY = 64


@dataclass
class Acceptance:
    """How often each draft was accepted, given that those before it were; old cycles fade."""

    depth: int
    offered: list[float] = field(init=False)
    accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.offered = [_PRIOR_WEIGHT] * self.depth
        self.accepted = [_PRIOR_WEIGHT * _PRIOR_CHANCE] * self.depth

    def observe(self, accepted: int, depth: int) -> None:
        """One row's cycle: `accepted` of `depth` drafts."""
        for position in range(min(depth, accepted + 1)):
            self.offered[position] = self.offered[position] * _FORGETTING + 1.0
            self.accepted[position] *= _FORGETTING
            self.accepted[position] += float(position < accepted)

    def tokens(self, depth: int) -> float:
        """Expected tokens of a cycle that verifies so many drafts."""
        total = chance = 1.0
        for position in range(depth):
            chance *= self.accepted[position] / self.offered[position]
            total += chance
        return total


class DepthPolicy:
    """Chooses each cycle's depth from costs that were measured and acceptance as it is seen."""

    def __init__(self, costs: Mapping[int, Mapping[int, float]], depth: int) -> None:
        """`costs[rows][depth]` in seconds, for some numbers of rows."""
        self.acceptance = Acceptance(depth)
        self._costs = {
            rows: {d: s for d, s in found.items() if d <= depth} for rows, found in costs.items()
        }
        self._plain_in_a_row = 0

    def choose(self, rows: int) -> int:
        """The depth that commits most tokens a second; now and then a small one, to learn."""
        costs = self.costs(rows)
        best = max(costs, key=lambda depth: self.acceptance.tokens(depth) / costs[depth])
        if best:
            self._plain_in_a_row = 0
            return best
        self._plain_in_a_row += 1
        if self._plain_in_a_row % _RETRY == 0:
            return min((depth for depth in costs if depth), default=0)
        return 0

    def gain(self, rows: int) -> float:
        """Tokens a second of the best depth over plain decoding's, as expected now."""
        costs = self.costs(rows)
        return max(self.acceptance.tokens(d) / costs[d] for d in costs) * costs[0]

    def costs(self, rows: int) -> Mapping[int, float]:
        """Of the next number of rows that was measured, or the largest."""
        measured = sorted(self._costs)
        return self._costs[next((n for n in measured if n >= rows), measured[-1])]


def depths(limit: int) -> tuple[int, ...]:
    """The ladder up to a drafter's own depth, which is always part of it."""
    return tuple(sorted({depth for depth in LADDER if depth < limit} | {limit}))
