"""The audit: is decoding with drafts lossless, token by token and as a distribution?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from domino_spec.audit.greedy import Difference, GreedyAudit, audit_greedy
from domino_spec.audit.sampling import SamplingAudit, audit_sampling
from domino_spec.audit.ways import EngineWay, Pass, ReferenceWay, Way, Written

__all__ = [
    "PROMPTS",
    "Audit",
    "Difference",
    "EngineWay",
    "GreedyAudit",
    "Pass",
    "ReferenceWay",
    "SamplingAudit",
    "Way",
    "Written",
    "audit_greedy",
    "audit_sampling",
]

PROMPTS: list[str] = json.loads(
    Path(__file__).with_name("prompts.json").read_text(encoding="utf-8")
)
"""Fifty short prompts of our own: questions, sums, code, lists, rewriting, stories."""
Answer = Literal["lossless", "bug", "unclear"]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Both halves; one of them may be left out."""

    greedy: GreedyAudit | None
    sampling: SamplingAudit | None
    interrupted: bool = False
    """Whether it was stopped before all was audited."""

    @property
    def _bugs(self) -> list[str]:
        bugs = 0 if self.greedy is None else self.greedy.count("bug")
        wrong = 0 if self.sampling is None else len(self.sampling.wrong)
        return [
            *([f"{bugs} greedy tokens that no rounding explains"] * (bugs > 0)),
            *([f"{wrong} places whose samples do not follow the target, twice"] * (wrong > 0)),
        ]

    @property
    def reasons(self) -> list[str]:
        """Why it is not simply lossless: bugs, then doubts."""
        greedy, sampling = self.greedy, self.sampling
        unclear = 0 if greedy is None else greedy.count("unclear")
        doubts = {
            f"{unclear} greedy tokens that cannot be judged": unclear,
            "nothing was drafted in the greedy part": greedy and not any(greedy.stats.offered),
            "nothing was drafted in the sampling part": sampling
            and not any(sampling.stats.offered),
            "no greedy token was compared": greedy and not greedy.tokens,
            "no place could be tested: every sample was the same": sampling and not sampling.places,
            "nothing was audited": greedy is None and sampling is None,
            "interrupted before all was audited": self.interrupted,
        }
        return [*self._bugs, *(doubt for doubt, holds in doubts.items() if holds)]

    @property
    def answer(self) -> Answer:
        """A bug outweighs a doubt."""
        if self._bugs:
            return "bug"
        return "unclear" if self.reasons else "lossless"

    @property
    def exit_code(self) -> int:
        """For CI."""
        return {"lossless": 0, "bug": 1, "unclear": 2}[self.answer]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "answer": self.answer,
            "reasons": self.reasons,
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
        }
