"""What the doctor says about one thing, and what the patient means to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "unknown", "warning", "problem"]
_SEVERITY: tuple[State, ...] = ("ok", "unknown", "warning", "problem")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing: what was found, what was expected, what to do."""

    name: str
    state: State
    found: Any
    expected: Any = None
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Plans:
    """What the pair will be used for."""

    context: int | None = None
    """The longest sequence, prompt and answer; None where nobody said."""
    rows: int = 1
    """Sequences at a time."""


def worst(findings: Iterable[Finding]) -> State:
    """The most serious state among them."""
    return max((finding.state for finding in findings), key=_SEVERITY.index, default="ok")
