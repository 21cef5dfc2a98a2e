"""Decodes each prompt twice with one loaded model, plainly and with drafts, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder, Generation
    from domino_spec.api.prompts import Prompt

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Comparison:
    """One prompt's two answers."""

    plain: Generation
    domino: Generation

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None when the answers are identical."""
        pairs = zip(self.plain.tokens, self.domino.tokens, strict=False)
        for index, (plain, domino) in enumerate(pairs):
            if plain != domino:
                return index
        lengths = len(self.plain.tokens), len(self.domino.tokens)
        return None if lengths[0] == lengths[1] else min(lengths)

    @property
    def identical(self) -> bool:
        """Whether Domino gave exactly the target's own tokens."""
        return self.first_difference is None

    @property
    def ratio(self) -> float:
        """How many times faster Domino was."""
        seconds = self.domino.run.seconds
        return self.plain.run.seconds / seconds if seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "tokens": len(self.domino.tokens),
            "tokens_per_cycle": self.domino.run.tokens_per_cycle,
            "plain_seconds": self.plain.run.seconds,
            "domino_seconds": self.domino.run.seconds,
            "ratio": self.ratio,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "text": self.domino.text,
        }


def warm_up(decoder: DominoDecoder, prompt: Prompt) -> None:
    """Let both ways pay their first-use costs before anything is timed."""
    for speculate in (False, True):
        decoder.generate(prompt, speculate=speculate, max_new_tokens=_WARM_UP_TOKENS)


def compare(decoder: DominoDecoder, prompt: Prompt, *, max_new_tokens: int) -> Comparison:
    """Answer one prompt both ways, greedily."""
    plain, domino = (
        decoder.generate([prompt], speculate=speculate, max_new_tokens=max_new_tokens)[0]
        for speculate in (False, True)
    )
    return Comparison(plain, domino)


def median_ratio(comparisons: Sequence[Comparison]) -> float:
    """The middle one of the ratios: a machine that stalls once must not make a speed-up."""
    return median(comparison.ratio for comparison in comparisons) if comparisons else 0.0
