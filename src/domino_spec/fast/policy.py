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
_TRIALS = 4
_RETRY = 64
_RESIGNED = 48


@dataclass
class Acceptance:
    """How often each draft was accepted, given that those before it were; old cycles fade."""

    depth: int
    offered: list[float] = field(init=False)
    accepted: list[float] = field(init=False)
    cycles: int = field(init=False, default=0)
    """How many were observed."""

    def __post_init__(self) -> None:
        self.offered = [_PRIOR_WEIGHT] * self.depth
        self.accepted = [_PRIOR_WEIGHT * _PRIOR_CHANCE] * self.depth

    def observe(self, accepted: int, depth: int) -> None:
        """One row's cycle: `accepted` of `depth` drafts."""
        self.cycles += 1
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


@dataclass(frozen=True, kw_only=True)
class Resigned:
    """Why drafts are left out: even their best depth commits fewer tokens a second than none."""

    rows: int
    plain: float
    """Seconds of a plain step."""
    depth: int
    cycle: float
    """Seconds of a cycle of that depth."""
    tokens: float
    """What it is likely to commit."""


class DepthPolicy:
    """Chooses each cycle's depth from costs that were measured and acceptance as it is seen."""

    def __init__(self, costs: Mapping[int, Mapping[int, float]], depth: int) -> None:
        """`costs[rows][depth]` in seconds, for some numbers of rows."""
        self.acceptance = Acceptance(depth)
        self._costs = {
            rows: {d: s for d, s in found.items() if d <= depth} for rows, found in costs.items()
        }
        self._plain_in_a_row = 0
        self._rows = 1

    def choose(self, rows: int) -> int:
        """The depth that commits most tokens a second; if that is 0, now and then another.

        The first few cycles draft whatever is expected, unless no acceptance could make them pay.
        """
        costs = self.costs(rows)
        best = self._best(costs)
        self._rows = rows
        if best:
            self._plain_in_a_row = 0
            return best
        promising = {d: s for d, s in costs.items() if d and s < (d + 1) * costs[0]}
        if promising and self.acceptance.cycles < _TRIALS:
            return self._best(promising)
        self._plain_in_a_row += 1
        again = bool(promising) and self._plain_in_a_row % _RETRY == 0
        return self._best(promising) if again else 0

    @property
    def resigned(self) -> Resigned | None:
        """What speaks against drafts, once plain decoding has been the best for a while."""
        costs = dict(self.costs(self._rows))
        plain = costs.pop(0)
        if self._plain_in_a_row < _RESIGNED or not costs:
            return None
        depth = self._best(costs)
        return Resigned(
            rows=self._rows,
            plain=plain,
            depth=depth,
            cycle=costs[depth],
            tokens=self.acceptance.tokens(depth),
        )

    def _best(self, costs: Mapping[int, float]) -> int:
        return max(costs, key=lambda depth: self.acceptance.tokens(depth) / costs[depth])

    def knows(self, rows: int) -> bool:
        """Whether costs of so many rows, or of more, were measured."""
        return max(self._costs) >= rows

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
