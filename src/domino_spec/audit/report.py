"""The audit's answer: lossless, a proven bug, or no way to tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from domino_spec.audit.greedy import GreedyAudit
from domino_spec.audit.sampling import SamplingAudit

Answer = Literal["lossless", "bug", "unclear"]
EXIT_CODES: dict[Answer, int] = {"lossless": 0, "bug": 1, "unclear": 2}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Both halves; one of them may be left out."""

    greedy: GreedyAudit | None
    sampling: SamplingAudit | None
    interrupted: bool = False
    """Whether it was stopped before all was audited."""

    @property
    def reasons(self) -> list[str]:
        """Why it is not simply lossless."""
        return [*self._bugs, *self._doubts]

    @property
    def answer(self) -> Answer:
        """A bug outweighs a doubt."""
        if self._bugs:
            return "bug"
        return "unclear" if self._doubts else "lossless"

    @property
    def exit_code(self) -> int:
        """For CI."""
        return EXIT_CODES[self.answer]

    @property
    def _bugs(self) -> list[str]:
        found = []
        if self.greedy is not None and self.greedy.count("bug"):
            found.append(f"{self.greedy.count('bug')} greedy tokens that no rounding explains")
        if self.sampling is not None and self.sampling.wrong:
            found.append(
                f"{len(self.sampling.wrong)} places whose samples do not follow the target, twice"
            )
        return found

    @property
    def _doubts(self) -> list[str]:
        found = []
        if self.greedy is not None and self.greedy.count("unclear"):
            found.append(f"{self.greedy.count('unclear')} greedy tokens that cannot be judged")
        for name, part in (("greedy", self.greedy), ("sampling", self.sampling)):
            if part is not None and not any(part.stats.offered):
                found.append(f"nothing was drafted in the {name} part")
        if self.greedy is not None and not self.greedy.tokens:
            found.append("no greedy token was compared")
        if self.sampling is not None and not self.sampling.places:
            found.append("no place could be tested: every sample was the same")
        if self.greedy is None and self.sampling is None:
            found.append("nothing was audited")
        if self.interrupted:
            found.append("interrupted before all was audited")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "answer": self.answer,
            "reasons": self.reasons,
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
        }
