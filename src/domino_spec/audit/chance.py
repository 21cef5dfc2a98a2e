"""Counts against known probabilities: cells, Pearson's statistic, Monte-Carlo p-values, Holm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST_EXPECTED = 5.0
"""A cell with fewer expected tokens says little and is joined with others."""
POWER = 0.9
_POWER_DRAWS = 300
_POWER_STEPS = 10
_MOST_STRETCHES = 10

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """Tokens counted in cells whose probabilities are known."""

    probabilities: Array  # [cells], the same for every sample
    favoured: Array  # [samples or 1, cells]: where the most likely token of each would fall
    best: Array  # [samples or 1]: that token's probability
    counts: NDArray[np.int64]  # [cells]: what was found

    @property
    def samples(self) -> int:
        """How many tokens were counted."""
        return int(self.counts.sum())

    @property
    def expected(self) -> Array:
        """Expected counts, [cells]."""
        return self.samples * self.probabilities

    def draw(self, rng: np.random.Generator, draws: int, *, greedy: float = 0.0) -> Array:
        """Counts [draws, cells] of as many samples from the probabilities.

        With `greedy`, that share of tokens is replaced by the most likely one.
        """
        chances = (1 - greedy) * self.probabilities + greedy * self.favoured
        if greedy == 0 or len(chances) == 1:
            return rng.multinomial(self.samples, chances[0], size=draws).astype(np.float64)
        cells = chances.shape[1]
        points = rng.random((draws, len(chances), 1))
        chosen = (points >= np.cumsum(chances, axis=1)[:, :-1]).sum(axis=2)  # [draws, samples]
        flat = (np.arange(draws)[:, None] * cells + chosen).ravel()
        counts = np.bincount(flat, minlength=draws * cells)
        return counts.reshape(draws, cells).astype(np.float64)

    def variation(self, greedy: float) -> float:
        """Total variation, summed over the samples, that such a replacement makes."""
        return greedy * self.samples * float((1 - self.best).mean())


def after_one_text(probabilities: Tensor, tokens: Tensor) -> Group | None:
    """Tokens [samples] that were drawn after the same text, from probabilities [vocabulary].

    A likely token is a cell of its own; which are follows from the probabilities alone. None where
    one cell would hold everything.
    """
    probabilities = probabilities.double() / probabilities.double().sum()
    labels, cells = _cells(probabilities * len(tokens))
    if cells < 2:
        return None
    chances = torch.zeros(cells, dtype=torch.float64).index_add_(0, labels, probabilities)
    best, token = probabilities.max(dim=0)
    return Group(
        probabilities=(chances / chances.sum()).numpy(),
        favoured=np.eye(cells)[[int(labels[token])]],
        best=np.array([float(best)]),
        counts=torch.bincount(labels[tokens], minlength=cells).numpy(),
    )


def after_many_texts(
    probabilities: Tensor, tokens: Tensor, rng: np.random.Generator
) -> Group | None:
    """Tokens [samples] drawn after texts of their own, from probabilities [samples, vocabulary].

    With its text's tokens in order of falling probability, side by side on a line of length one,
    each token is a stretch. A random point of the drawn token's stretch is uniform on the line.
    """
    samples = len(tokens)
    cells = min(_MOST_STRETCHES, int(samples / (2 * LEAST_EXPECTED)))
    if cells < 2:
        return None
    probabilities = probabilities.double() / probabilities.double().sum(dim=1, keepdim=True)
    own = probabilities.gather(1, tokens.unsqueeze(1))  # [samples, 1]
    tokens_before = torch.arange(probabilities.shape[1]) < tokens.unsqueeze(1)
    # Equal ones stand in the order of their ids.
    before = (probabilities > own) | ((probabilities == own) & tokens_before)
    start = (probabilities * before).sum(dim=1).numpy()
    points = start + rng.random(samples) * own.squeeze(1).numpy()
    cell = np.clip((points * cells).astype(np.int64), 0, cells - 1)
    best = probabilities.max(dim=1).values.numpy()
    edges = np.arange(cells + 1) / cells
    reached = np.minimum(edges, best[:, None]) / best[:, None]  # [samples, cells + 1]
    return Group(
        probabilities=np.full(cells, 1 / cells),
        favoured=np.diff(reached, axis=1),
        best=best,
        counts=np.bincount(cell, minlength=cells),
    )


def _cells(expected: Tensor) -> tuple[Tensor, int]:
    """A cell for each token [vocabulary]: its own if it is likely, else with its neighbours."""
    values, order = expected.sort(descending=True)
    likely = int((values >= LEAST_EXPECTED).sum())
    places = torch.arange(len(values))
    tail = values[likely:].cumsum(0)
    rest = float(tail[-1]) if len(tail) else 0.0
    joined = max(int(rest // LEAST_EXPECTED), 1 if likely == 0 else 0)
    if joined:
        # Whole cells of equal weight; rounding must not open one more.
        step = (tail / (rest / joined)).floor().long().clamp(max=joined - 1)
        places[likely:] = likely + step
    else:
        places[likely:] = max(likely - 1, 0)
    labels = torch.empty_like(places)
    labels[order] = places
    present: Tensor = torch.unique(labels)
    return torch.searchsorted(present, labels), len(present)


def statistic(groups: Sequence[Group], counts: Sequence[Array]) -> Array:
    """Pearson's, summed over cells and groups, for each row of counts [draws, cells]."""
    total = np.zeros(len(counts[0]))
    for group, found in zip(groups, counts, strict=True):
        expected = group.expected
        total += ((found - expected) ** 2 / expected).sum(axis=1)
    return total


@dataclass(frozen=True, kw_only=True)
class CountTest:
    """Whether the tokens at one place follow the target's probabilities."""

    samples: int
    cells: int
    statistic: float
    p: float
    """Exact up to the Monte-Carlo draws: never too small by chance of the method."""
    detectable: float | None
    """Total variation found nine times in ten, if so many tokens were replaced by the most likely
    one; None where even all would not show."""


def run_test(
    groups: Sequence[Group], *, level: float, draws: int, rng: np.random.Generator
) -> CountTest | None:
    """Test all groups at once; `level` is the chance of a false alarm this one may have."""
    groups = [group for group in groups if group.samples]
    if not groups:
        return None
    found = float(statistic(groups, [g.counts[None].astype(np.float64) for g in groups])[0])
    null = statistic(groups, [group.draw(rng, draws) for group in groups])
    exceeding = int((null >= found * (1 - 1e-12)).sum())
    return CountTest(
        samples=sum(group.samples for group in groups),
        cells=sum(len(group.counts) for group in groups),
        statistic=found,
        p=(1 + exceeding) / (1 + draws),
        detectable=_detectable(groups, float(np.quantile(null, 1 - level)), rng),
    )


def _detectable(groups: Sequence[Group], critical: float, rng: np.random.Generator) -> float | None:
    def seen(greedy: float) -> bool:
        counts = [group.draw(rng, _POWER_DRAWS, greedy=greedy) for group in groups]
        return bool((statistic(groups, counts) > critical).mean() >= POWER)

    if not seen(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_POWER_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    samples = sum(group.samples for group in groups)
    return sum(group.variation(high) for group in groups) / samples


def holm(ps: Sequence[float]) -> list[float]:
    """P-values adjusted so that the smallest of many does not deceive."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    adjusted = [0.0] * len(ps)
    worst = 0.0
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = worst
    return adjusted
