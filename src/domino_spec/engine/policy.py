"""How many drafts to verify, in a chain or a tree: a cycle's cost against what it may commit.

A cycle costs more the more drafts it verifies, and the last of them are the least likely to be
accepted. In a large batch, or on a processor that is busy with a small one, fewer drafts pay;
sometimes none. The same holds where choosing a token is expensive: every verified draft is sampled
or penalised. A tree accepts more than a chain of as many drafts, which may be worth its making. And
a batch may verify the likeliest drafts of all its sequences, some of one and many of another
(`verify_lengths`), which is worth more than as many of each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LADDER = (0, 1, 2, 3, 5, 7, 11, 15)
"""Depths worth measuring; 0 is plain decoding."""
TREES = (3, 7, 15)
"""Nodes of trees worth measuring."""
BUDGETS = (1, 2, 3, 5)
"""Drafts a sequence, on average over a batch, worth measuring where lengths differ."""
LEAST_RAGGED = 4
"""Sequences of the smallest batch in which they do."""
_FORGETTING, _FORGETTING_FAST, _FORGETTING_SLOW = 0.98, 0.9, 0.995
"""Of a sequence's cycles, of cycles of whole batches, and of what trees gain."""
_PRIOR_CHANCE = 0.8
_PRIOR_WEIGHT = 4.0
_TRIALS = 4
_RETRY = 64
"""Cycles after which another kind is tried again. In the time of so many plain ones a look at
drafts that are never accepted takes no more than one in addition."""
_DISABLED_AFTER = 48
_HOPED_GAIN = 1.2
"""What a tree, or a budget, is hoped to commit, compared with a chain of as many drafts."""
_UNCERTAINTY = 2.0
"""Tokens that trees may gain beyond what one cycle of theirs showed; less by its square root after
more of them. Else a few unlucky ones would put them off for long."""

_COMMON_SHARE, _OWN_SHARE = 0.1, 0.1
"""Of what a cycle took beyond what was expected: learnt of all cycles, and at least of its kind."""
_KEPT = 0.996
"""Of what is known of one kind of cycle alone, after each cycle."""
_EXPLORED_EVERY, _REFRESHED_EVERY = 16, 512
_PAUSE = 10.0
"""A cycle that took so many times what was expected was interrupted."""

Seconds = Mapping[int, Mapping[int, float]]
"""By batch size and by depth, or by a tree's nodes."""


class Drafts(NamedTuple):
    """What a cycle verifies: a chain of `depth` drafts, or a tree of `nodes` up to `depth` deep.

    Or of chains of `depth` drafts so many as make `budget` a sequence, on average.
    """

    depth: int
    nodes: int = 0
    budget: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether all sequences verify as many drafts, in a chain."""
        return not self.nodes and not self.budget


@dataclass(frozen=True)
class Costs:
    """Measured for some batch sizes, interpolated linearly between them."""

    cycles: Seconds
    """Of cycles in which every sequence is greedy and nothing else is asked for."""
    extras: Mapping[str, Seconds] = field(default_factory=dict)
    """What a kind of cycle adds, by the kind's name; interpolated between depths too.

    Kinds add up: a cycle that samples and penalises pays for both.
    """
    trees: Seconds = field(default_factory=dict)
    """Of the same cycles with trees, by the number of nodes."""
    budgets: Seconds = field(default_factory=dict)
    """Of the same cycles with lengths that differ, by the budget."""

    def __post_init__(self) -> None:
        if not self.cycles:
            raise ValueError("costs need at least one batch size; none was given")

    @property
    def largest_batch(self) -> int:
        """The largest batch size that was measured."""
        return max(self.cycles)

    def of(self, size: int, kinds: Collection[str] = ()) -> dict[int, float]:
        """Seconds by depth; beyond the batch sizes that were measured, those of the nearest."""
        return self._with_extras(self.cycles, size, kinds)

    def of_trees(self, size: int, kinds: Collection[str] = ()) -> dict[int, float]:
        """Seconds by nodes."""
        return self._with_extras(self.trees, size, kinds) if self.trees else {}

    def of_budgets(self, size: int, kinds: Collection[str] = ()) -> dict[int, float]:
        """Seconds by budget."""
        return self._with_extras(self.budgets, size, kinds) if self.budgets else {}

    def _with_extras(self, cycles: Seconds, size: int, kinds: Collection[str]) -> dict[int, float]:
        lower, upper = _around(cycles, size)
        wanted = cycles[lower].keys() & cycles[upper].keys()
        extras = [self.extras[kind] for kind in kinds if kind in self.extras]
        return rising({
            count: _at({n: cycles[n][count] for n in (lower, upper)}, size)
            + sum(_at({n: _added(each[n], count) for n in each}, size) for each in extras)
            for count in wanted
        })  # fmt: skip


class LiveCosts:
    """What cycles of one kind of batch cost now: what was measured once, corrected as they run.

    A measurement may have met a busy machine; another context costs another time. So each cost has
    two factors: one that all share (a longer context, a slower machine), learnt from every cycle,
    and one of its own. Of the last three cycles of a kind the shortest counts: other work on the
    machine only ever adds.
    """

    def __init__(self, measured: Mapping[Drafts, float]) -> None:
        self._measured = measured
        self._common = 0.0  # logarithms of the factors
        self._own = dict.fromkeys(measured, 0.0)
        self._last: dict[Drafts, deque[float]] = {each: deque(maxlen=3) for each in measured}
        self._seconds: dict[Drafts, float] | None = None  # until the next observation
        self.seen = dict.fromkeys(measured, 0)
        """Cycles of each kind that were observed."""

    def __getitem__(self, drafts: Drafts) -> float:
        return self._measured[drafts] * math.exp(self._common + self._own[drafts])

    @property
    def seconds(self) -> Mapping[Drafts, float]:
        """By what is verified."""
        if self._seconds is None:
            self._seconds = {drafts: self[drafts] for drafts in self._measured}
        return self._seconds

    def observe(self, drafts: Drafts, seconds: float) -> None:
        """A cycle took so long."""
        if drafts not in self._measured or seconds <= 0:
            return
        last, self._seconds = self._last[drafts], None
        last.append(seconds)
        least = min(last)
        if least > _PAUSE * self[drafts] and len(last) < last.maxlen:  # type: ignore[operator]
            return  # it was interrupted, unless all are like that
        error = math.log(least / self[drafts])
        if not any(self.seen.values()):
            self._common = error
        else:
            self._common += _COMMON_SHARE * error
            self._own[drafts] += max(1 / (2 + self.seen[drafts]), _OWN_SHARE) * error
        self.seen[drafts] += 1
        for each in self._own:  # what was seen long ago is believed less and less
            self._own[each] *= _KEPT


@dataclass
class Acceptance:
    """How often each draft of a chain was accepted, and what trees gained; old cycles fade."""

    depth: int
    nodes: int = 0
    """Of the largest tree."""
    offered: list[float] = field(init=False)
    accepted: list[float] = field(init=False)
    """Drafts of a chain, given that those before were accepted."""
    hoped: list[float] = field(init=False)
    """A draft is hoped to be accepted as often as all are, for as many cycles; they fade too."""
    trees_seen: list[float] = field(init=False)
    """Cycles with so many nodes of a tree, or more: the first n nodes are the tree of n nodes."""
    trees_tried: list[int] = field(init=False)
    """The same, of which none fade."""
    trees_gained: list[float] = field(init=False)
    """What these accepted beyond a chain. It hardly depends on the text, as acceptance itself does:
    so it holds while chains are run."""
    cycles: int = field(init=False, default=0)
    """How many were recorded."""

    def __post_init__(self) -> None:
        self.offered, self.accepted = [0.0] * self.depth, [0.0] * self.depth
        self.hoped = [_PRIOR_WEIGHT] * self.depth
        self._overall = _PRIOR_CHANCE
        self.trees_seen, self.trees_gained = [0.0] * self.nodes, [0.0] * self.nodes
        self.trees_tried = [0] * self.nodes

    def record(self, accepted: int, depth: int) -> None:
        """One sequence's cycle: `accepted` of `depth` drafts."""
        self.cycles += 1
        self._record_chain(accepted, depth)

    def record_tree(self, path: Sequence[int], parents: Sequence[int]) -> None:
        """One sequence's cycle: the accepted nodes of a tree in which each has such a parent.

        Node 0 is the anchor. Best children alone are the chain that would have been drafted, as far
        as the tree holds it.
        """
        self.cycles += 1
        best = best_path(parents)
        agree = 0
        while agree < min(len(best), len(path)) and best[agree] == path[agree]:
            agree += 1
        # Where the tree ends before the chain would, what is known of chains says how it goes on.
        chain = agree + (self._further(len(best)) if agree == len(best) else 0.0)
        accepted, chosen = 0, set(path)
        for place in range(len(parents) - 1):
            accepted += place + 1 in chosen
            self.trees_tried[place] += 1
            self.trees_seen[place] = self.trees_seen[place] * _FORGETTING_SLOW + 1.0
            self.trees_gained[place] *= _FORGETTING_SLOW
            self.trees_gained[place] += accepted - chain
        self._record_chain(agree, min(agree + 1, len(best)))

    def _record_chain(self, accepted: int, depth: int) -> None:
        for position in range(min(depth, accepted + 1)):
            self.offered[position] = self.offered[position] * _FORGETTING + 1.0
            self.accepted[position] *= _FORGETTING
            self.accepted[position] += float(position < accepted)
            self.hoped[position] *= _FORGETTING
        known = sum(self.accepted) + _PRIOR_WEIGHT * _PRIOR_CHANCE
        self._overall = known / (sum(self.offered) + _PRIOR_WEIGHT)

    def _further(self, start: int, depth: int | None = None) -> float:
        """Expected drafts of a chain that are accepted after the first `start`, which were."""
        total, chance = 0.0, 1.0
        for position in range(start, self.depth if depth is None else depth):
            hoped, offered = self.hoped[position], self.offered[position]
            chance *= (self.accepted[position] + hoped * self._overall) / (offered + hoped)
            total += chance
        return total

    def tokens(self, depth: int) -> float:
        """Expected tokens of a cycle that verifies so many drafts."""
        return 1.0 + self._further(0, depth)

    def tree_tokens(self, nodes: int) -> float:
        """Expected tokens of a cycle that verifies such a tree."""
        hoped = _HOPED_GAIN * self.tokens(min(nodes, self.depth))
        seen, tried = self.trees_seen[nodes - 1], self.trees_tried[nodes - 1]
        if not tried:
            return hoped
        # What is hoped counts as so many cycles, fewer with each that was tried.
        faith = _PRIOR_WEIGHT * _FORGETTING**tried
        gained = self.trees_gained[nodes - 1] / seen + _UNCERTAINTY / math.sqrt(tried)
        found = self.tokens(self.depth) + gained
        return (faith * hoped + seen * found) / (faith + seen)


class Promises:
    """What budgets are likely to commit: as chances promised it, by how such promises were kept."""

    def __init__(self) -> None:
        self._promised: dict[int, float] = {}
        self._hoped: dict[int, float] = {}
        """How little is known of each budget: 1 before it was seen."""
        self._offered = self._accepted = 0.0

    def record(self, promised: Sequence[float], budget: int, accepted: float) -> None:
        """A cycle's promises by budget, from 1 on, and what its own gave: drafts a sequence.

        For larger budgets it has drafted too little: they get as much, or more.
        """
        for each, own in enumerate(promised, start=1):
            before, faith = self._promised.get(each, 0.0), self._hoped.get(each, 1.0)
            if each > budget and (faith == 1.0 or own * (1 - faith) <= before):
                continue
            self._promised[each] = before + (1 - _FORGETTING_FAST) * (own - before)
            self._hoped[each] = faith * _FORGETTING_FAST
        self._offered = self._offered * _FORGETTING_FAST + promised[budget - 1]
        self._accepted = self._accepted * _FORGETTING_FAST + accepted

    def tokens(self, budget: int, hoped: float) -> float:
        """Expected tokens a sequence, where so many are hoped for before anything was seen."""
        if budget not in self._promised or not self._offered:
            return hoped
        faith = self._hoped[budget]
        seen = self._promised[budget] / (1 - faith)
        return faith * hoped + (1 - faith) * (1 + self._accepted / self._offered * seen)


@dataclass(frozen=True, kw_only=True)
class Disabled:
    """Why drafting is disabled: even the best depth commits fewer tokens per second than none."""

    batch_size: int
    kinds: tuple[str, ...]
    """What the sequences ask for besides greedy tokens."""
    plain: float
    """Seconds of a plain step."""
    depth: int
    cycle: float
    """Seconds of a cycle of that depth."""
    tokens: float
    """What it is likely to commit."""


@dataclass
class PlainRun:
    """Plain cycles in a row of one kind, but for looks at what drafts would commit."""

    cycles: int = 0
    looked: int = 0
    """The cycle of the last look, ..."""
    depth: int = 0
    tokens: float = math.inf
    """... what it verified, and the tokens that were expected of it."""

    @property
    def goes_on(self) -> bool:
        """Whether the last cycle was a plain one: what a look told is considered at once."""
        return self.cycles > self.looked


@dataclass(frozen=True)
class Batch:
    """The sequences for which a depth is chosen."""

    size: int
    kinds: tuple[str, ...] = ()
    """What some sequences ask for besides greedy tokens: names of `Costs.extras`."""
    drawn: float = 0.0
    """The share of the sequences that sample."""
    trees: bool = False
    """Whether all can verify trees."""
    ragged: bool = False
    """Whether they can verify different numbers of drafts."""
    timed: bool = True
    """Whether it will be known what their cycles took."""


class DepthPolicy:
    """Chooses each cycle's drafts from costs that were measured and acceptance as it is seen.

    Sequences that sample accept other drafts than greedy ones do, so they are counted separately.
    """

    def __init__(self, costs: Costs, depth: int, nodes: int = 0) -> None:
        self.acceptance = Acceptance(depth, nodes)
        """Of greedy sequences."""
        self.drawn = Acceptance(depth, nodes)
        """Of sequences that sample."""
        self._depth, self._nodes = depth, nodes
        self._measured = costs
        self._live: dict[tuple[int, tuple[str, ...]], LiveCosts] = {}
        self._turns: dict[tuple[int, tuple[str, ...]], int] = {}
        self._plain: dict[tuple[str, ...], PlainRun] = {}
        self._chains_in_a_row: dict[tuple[str, ...], int] = {}
        self.promises: dict[tuple[str, ...], Promises] = {}
        """Of budgets, by what sequences ask for."""
        self._last = Batch(1)

    def record(self, accepted: int, depth: int, *, sampled: bool) -> None:
        """One sequence's cycle: `accepted` of `depth` drafts."""
        (self.drawn if sampled else self.acceptance).record(accepted, depth)

    def record_tree(self, path: Sequence[int], parents: Sequence[int], *, sampled: bool) -> None:
        """One sequence's cycle: the accepted nodes of a tree."""
        (self.drawn if sampled else self.acceptance).record_tree(path, parents)

    def record_lengths(
        self, batch: Batch, promised: Sequence[float], budget: int, accepted: float
    ) -> None:
        """A cycle of a batch whose lengths differed: `Promises.record`."""
        own = self.promises.setdefault(batch.kinds, Promises())
        own.record(promised, budget, accepted)

    def observe(self, batch: Batch, drafts: Drafts, seconds: float) -> None:
        """A cycle that verified these for such a batch took so long, host and all."""
        self._costs_of(batch.size, batch.kinds).observe(drafts, seconds)

    def choose(self, batch: Batch) -> Drafts:
        """The drafts that commit most tokens a second: a chain, a tree, a budget or none.

        While chains are best, the others have a try now and then, unless they are too expensive to
        pay. And what is not chosen is run now and then, to see what it costs today. While a batch
        decodes plainly that is reconsidered once in a while alone, since it takes time itself.
        """
        key = batch.size, batch.kinds
        turn = self._turns[key] = self._turns.get(key, 0) + 1
        plain = self._plain.get(batch.kinds)
        if plain is not None and plain.goes_on and batch == self._last and turn % _EXPLORED_EVERY:
            plain.cycles += 1
            return Drafts(0)
        costs = self.costs(batch.size, batch.kinds)
        found = self._choose_other(costs, batch)
        if found is None:
            found = Drafts(self._choose_depth(costs, batch))
        else:
            self._last = batch
            self._plain.pop(batch.kinds, None)
        return self._explored(costs, batch, found)

    def _explored(self, costs: Mapping[int, float], batch: Batch, found: Drafts) -> Drafts:
        """Another chain instead, where it has hardly been seen, or plain decoding for long.

        That is plain decoding, or a chain that by what was measured is the best or nearly so.
        """
        live, turn = self._costs_of(batch.size, batch.kinds), self._turns[batch.size, batch.kinds]
        if not batch.timed or turn % _EXPLORED_EVERY:
            return found
        if not any(live.seen.values()):
            return found
        paces = {depth: self.tokens(depth, batch) / seconds for depth, seconds in costs.items()}
        near = {
            depth: pace for depth, pace in paces.items() if pace * _HOPED_GAIN > max(paces.values())
        }
        for depth in (0, *sorted(near, key=lambda each: -near[each])):
            if (other := Drafts(depth)) != found and live.seen[other] < _TRIALS:
                return other
        if not found.depth or turn % _REFRESHED_EVERY == 0:
            return Drafts(0)
        # A budget does not tell what chains would commit: one as deep tells of all of them.
        again = found.budget and turn % _RETRY == 0
        return Drafts(max(d for d in costs if d <= found.depth)) if again else found

    def _choose_other(self, costs: Mapping[int, float], batch: Batch) -> Drafts | None:
        """The tree or budget that commits most tokens a second; None where a chain commits more."""
        seconds = self._costs_of(batch.size, batch.kinds).seconds
        others = {d: s for d, s in seconds.items() if self._can_verify(d, batch)}
        if not others:
            return None
        depth = self._best(costs, batch)
        pace = self.tokens(depth, batch) / costs[depth]
        chains = self._chains_in_a_row.get(batch.kinds, 0) + 1
        self._chains_in_a_row[batch.kinds] = chains
        if chains % _RETRY == 0 and depth:
            # What a tree might get, whatever the last ones got: a large one tells of all smaller
            # ones, and so does a budget, which has its turn after the trees'.
            affordable = [d for d, s in others.items() if s < _HOPED_GAIN * costs[depth]]
            budgets = chains // _RETRY % 2 == 0
            own = [d for d in affordable if bool(d.budget) is budgets] or affordable
            return max(own, default=None)
        best = max(others, key=lambda d: self._other_tokens(d, batch) / others[d])
        if self._other_tokens(best, batch) / others[best] <= pace:
            return None
        self._chains_in_a_row[batch.kinds] = 0
        return best

    @staticmethod
    def _can_verify(drafts: Drafts, batch: Batch) -> bool:
        """Whether it is a tree or a budget that these sequences can have."""
        return (drafts.nodes > 0 and batch.trees) or (drafts.budget > 0 and batch.ragged)

    def _choose_depth(self, costs: Mapping[int, float], batch: Batch) -> int:
        """The depth that commits most tokens a second; if that is 0, now and then another.

        The first few cycles draft whatever is expected, unless no acceptance could make them pay.
        """
        best = self._best(costs, batch)
        self._last = batch
        if best:
            self._plain.pop(batch.kinds, None)
            return best
        promising = {d: s for d, s in costs.items() if d and s < (d + 1) * costs[0]}
        if promising and self._trials(batch) < _TRIALS:
            return self._best(promising, batch)
        return self._look_again(costs, promising, batch)

    def _look_again(
        self, costs: Mapping[int, float], promising: Mapping[int, float], batch: Batch
    ) -> int:
        """A depth that is verified though plain cycles are best, now and then; else 0.

        One that costs more than two plain cycles comes less often. After a look whose drafts were
        accepted the next is soon.
        """
        plain = self._plain.setdefault(batch.kinds, PlainRun())
        plain.cycles += 1
        gained = self.tokens(plain.depth, batch) > plain.tokens
        if plain.cycles - plain.looked < (_EXPLORED_EVERY if gained else _RETRY):
            return 0
        # What was measured may be wrong, until it was seen.
        seen = self._costs_of(batch.size, batch.kinds).seen
        unseen = {}
        if any(seen.values()):
            unseen = {d: s for d, s in costs.items() if d and seen[Drafts(d)] < _TRIALS}
        if not (promising or unseen):
            return 0
        depth = self._best({**promising, **unseen}, batch)
        added = costs[depth] / costs[0] - 1  # in plain cycles
        waited = plain.cycles - plain.looked
        if waited < _RETRY * added and not gained and depth not in unseen:
            return 0
        plain.looked, plain.depth, plain.tokens = plain.cycles, depth, self.tokens(depth, batch)
        return depth

    @property
    def disabled(self) -> Disabled | None:
        """Why drafting is disabled, once plain decoding has been the best for a while."""
        last = self._last
        costs = dict(self.costs(last.size, last.kinds))
        plain = costs.pop(0)
        plain_run = self._plain.get(last.kinds, PlainRun())
        if plain_run.cycles < _DISABLED_AFTER or not costs:
            return None
        depth = self._best(costs, last)
        return Disabled(
            batch_size=last.size,
            kinds=last.kinds,
            plain=plain,
            depth=depth,
            cycle=costs[depth],
            tokens=self.tokens(depth, last),
        )

    def tokens(self, depth: int, batch: Batch) -> float:
        """The expected tokens per sequence and cycle at this depth."""
        greedy = self.acceptance.tokens(depth) if batch.drawn < 1 else 0.0
        drawn = self.drawn.tokens(depth) if batch.drawn > 0 else 0.0
        return (1 - batch.drawn) * greedy + batch.drawn * drawn

    def _other_tokens(self, drafts: Drafts, batch: Batch) -> float:
        """The expected tokens per sequence and cycle of a tree or a budget."""
        if drafts.budget:
            # No more than if all of every chain were verified.
            hoped = _HOPED_GAIN * self.tokens(drafts.budget, batch)
            hoped = min(hoped, self.tokens(drafts.depth, batch))
            promises = self.promises.get(batch.kinds)
            return hoped if promises is None else promises.tokens(drafts.budget, hoped)
        greedy = self.acceptance.tree_tokens(drafts.nodes) if batch.drawn < 1 else 0.0
        drawn = self.drawn.tree_tokens(drafts.nodes) if batch.drawn > 0 else 0.0
        return (1 - batch.drawn) * greedy + batch.drawn * drawn

    def _trials(self, batch: Batch) -> int:
        """Recorded cycles of the kind of sequence (greedy, sampling) that has fewer."""
        known = [
            each.cycles
            for each, there in ((self.acceptance, batch.drawn < 1), (self.drawn, batch.drawn > 0))
            if there
        ]
        return min(known)

    def _best(self, costs: Mapping[int, float], batch: Batch) -> int:
        return max(costs, key=lambda depth: self.tokens(depth, batch) / costs[depth])

    def knows(self, size: int) -> bool:
        """Whether costs of batches of this size, or larger, were measured."""
        return self._measured.largest_batch >= size

    def gain(self, batch: Batch) -> float:
        """Expected speedup of the best depth."""
        costs = self.costs(batch.size, batch.kinds)
        return max(self.tokens(d, batch) / costs[d] for d in costs) * costs[0]

    def costs(self, size: int, kinds: tuple[str, ...] = ()) -> Mapping[int, float]:
        """Seconds by depth of a cycle of a batch of this size."""
        live = self._costs_of(size, kinds).seconds
        return {drafts.depth: seconds for drafts, seconds in live.items() if drafts.is_chain}

    def _costs_of(self, size: int, kinds: tuple[str, ...]) -> LiveCosts:
        found = self._live.get((size, kinds))
        if found is None:
            chains = {Drafts(d): s for d, s in self._measured.of(size, kinds).items()}
            branched = {
                Drafts(min(n, self._depth), n): s
                for n, s in self._measured.of_trees(size, kinds).items()
                if n <= self._nodes
            }
            ragged = {
                budgeted(b, self._depth): s
                for b, s in self._measured.of_budgets(size, kinds).items()
                if b < self._depth
            }
            known = {
                drafts: seconds
                for drafts, seconds in (chains | branched | ragged).items()
                if drafts.depth <= self._depth and math.isfinite(seconds)
            }
            found = self._live[size, kinds] = LiveCosts(known)
        return found


def depths(limit: int) -> tuple[int, ...]:
    """The ladder up to a drafter's own depth, which is always part of it."""
    return tuple(sorted({depth for depth in LADDER if depth < limit} | {limit}))


def trees(limit: int) -> tuple[int, ...]:
    """Sizes of trees worth measuring up to this one, which is part of them; none for 0."""
    return tuple(sorted({nodes for nodes in TREES if nodes < limit} | {limit})) if limit else ()


def budgets(depth: int) -> tuple[int, ...]:
    """Budgets worth measuring of chains so deep."""
    return tuple(budget for budget in BUDGETS if budget < depth)


def budgeted(budget: int, depth: int) -> Drafts:
    """What is drafted with a budget, of up to so many: drafts that are not verified cost too."""
    return Drafts(min(depth, 2 * budget + 1), budget=budget)


def best_path(parents: Sequence[int]) -> list[int]:
    """The nodes reached by best children alone: the first of those that have the same parent."""
    path, tip = [], 0
    for node in range(1, len(parents)):
        if parents[node] == tip:
            path.append(node)
            tip = node
    return path


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


def _added(points: Mapping[int, float], count: int) -> float:
    """What so many verified drafts add: beyond the last point by the token."""
    return _at(points, count) * max(1.0, (count + 1) / (max(points) + 1))


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
