"""Small measurements: the same answers of the target, drafted for in several ways."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.baselines import NamedProposer
from domino_spec.decoding import RowStats
from domino_spec.drafter import Drafter
from domino_spec.evaluation import Continuations, continue_prompts, simulate
from domino_spec.evaluation.runs import greedy_counts

_CLEAR = 3.0
"""Standard deviations between two averages that chance does not make."""


@dataclass(frozen=True)
class Trial:
    """What one way of drafting gave."""

    stats: RowStats

    @property
    def tokens_per_cycle(self) -> float:
        """All committed tokens over all cycles."""
        return self.stats.tokens_per_cycle

    def clearly_better_than(self, other: Trial) -> bool:
        """Whether more drafts a cycle were accepted, beyond chance."""
        (mine, my_error), (theirs, their_error) = self._accepted(), other._accepted()
        return mine - theirs > _CLEAR * math.sqrt(my_error + their_error)

    def _accepted(self) -> tuple[float, float]:
        """Mean of the accepted drafts a cycle, and the square of its standard error."""
        cycles, reached = self.stats.cycles, self.stats.accepted
        if not cycles:
            return 0.0, 0.0
        mean = sum(reached) / cycles
        square = sum((2 * place + 1) * count for place, count in enumerate(reached)) / cycles
        return mean, max(square - mean**2, 0.0) / cycles


def answers(
    decoder: DominoDecoder, prompts: Sequence[Sequence[int]], *, tokens: int
) -> Continuations:
    """The target's own answers, which every trial drafts for."""
    return continue_prompts(
        decoder.target,
        prompts,
        eos=decoder.eos_token_ids,
        max_new_tokens=tokens,
        batch_size=len(prompts),
    )


def measure(
    decoder: DominoDecoder, drafts: NamedProposer, continuations: Continuations, **changes: Any
) -> Trial:
    """Tokens a cycle with the drafter as it is, or with fields of its configuration changed.

    Block drafters are simulated, which counts the same; others decode.
    """
    if not isinstance(drafts.drafter, Drafter):
        assert not changes, "only block drafters can be read differently"
        counts = greedy_counts(
            decoder.target,
            drafts.make(),
            continuations.prompts,
            max_new_tokens=continuations.max_new_tokens,
            eos=decoder.eos_token_ids,
            batch_size=len(continuations.prompts),
        )
        return Trial(counts)
    drafter = changed(drafts.drafter, **changes) if changes else drafts.drafter
    depth = min(drafts.depth, drafter.config.max_depth)
    simulated = simulate(
        drafter, decoder.target, continuations, depth=depth, candidates=drafts.candidates
    )
    return Trial(simulated.total)


def changed(drafter: Drafter, **changes: Any) -> Drafter:
    """The same weights under a configuration that reads them differently."""
    other = copy.copy(drafter)
    other._modules = dict(drafter._modules)
    other.config = dataclasses.replace(drafter.config, **changes)
    return other
