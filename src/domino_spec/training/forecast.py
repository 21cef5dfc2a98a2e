"""What a run will come to, as far as the runs on record tell: its plan and its acceptance length.

The constants in forecast.json are fitted to records/ by `make results` (benchmarks/forecast.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIT_FILE = Path(__file__).with_name("forecast.json")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Two laws about accepted drafts per cycle, which is the acceptance length less one.

    Within a run they grow with the logarithm of the share that is done, d(s) = d(1) · (1 + growth ·
    ln s). From run to run they grow with a power of the tokens.
    """

    growth: float
    errors: list[tuple[float, float]]
    """From this share of a run on, nine of ten estimates were off by this part of the true
    acceptance length or less; from earlier on they were worth nothing."""
    exponent: float
    drafts: tuple[float, float]
    """The fewest and the most that runs reached, put at `REFERENCE` tokens by the exponent."""
    tokens: tuple[float, float]
    """The fewest and the most that these runs read."""
    runs: int
    targets: list[str]


REFERENCE = 1e7
_BEYOND = 2.0  # times more or fewer tokens than any run on record read
FIT = Fit(**json.loads(FIT_FILE.read_text(encoding="utf-8")))


def expected_from_records(tokens: float, fit: Fit = FIT) -> list[float] | None:
    """The range of acceptance lengths that runs over so many tokens reach, where any are alike."""
    fewest, most = fit.tokens
    if not fewest / _BEYOND <= tokens <= most * _BEYOND:
        return None
    factor = (tokens / REFERENCE) ** fit.exponent
    return [round(1 + drafts * factor, 3) for drafts in fit.drafts]


@dataclass(frozen=True)
class Seen:
    """Drafts accepted per cycle at a share of a run, or on average since an earlier one."""

    drafts: float
    share: float
    since: float | None = None

    @property
    def half_way(self) -> float:
        """The share that an average is taken to be true of."""
        return self.share if self.since is None else (self.since + self.share) / 2


def expected_at_end(seen: Seen, fit: Fit = FIT) -> list[float] | None:
    """The range of acceptance lengths at the end; None too early, and at the end itself."""
    errors = [error for begins, error in fit.errors if seen.share >= begins]
    if not errors or seen.share >= 1:
        return None
    grown = 1 + fit.growth * math.log(seen.half_way)
    if grown <= 0:
        return None
    length = 1 + seen.drafts / grown
    return [round(max(1.0, length * (1 + sign * errors[-1])), 3) for sign in (-1, 1)]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What can be said of one run."""

    tokens_per_step: int
    steps_per_epoch: float
    recorded_shape: bool
    """Whether it is shaped like the runs on record."""
    from_scratch: bool
    """Whether it starts like them, so that its curve is theirs."""

    def plan(self, steps: int) -> dict[str, Any]:
        """A run of so many steps, before its first."""
        tokens = steps * self.tokens_per_step
        alike = self.recorded_shape and self.from_scratch
        expected = expected_from_records(tokens) if alike else None
        source = f"{FIT.runs} runs on record, {' and '.join(FIT.targets)}"
        return {
            "steps": steps,
            "tokens": tokens,
            "epochs": round(steps / self.steps_per_epoch, 2),
            "expected_tokens_per_cycle": expected,
            "expected_from": source if expected else None,
        }

    def at_end(self, seen: Seen) -> dict[str, Any]:
        """The acceptance length to expect, from the run's own curve."""
        expected = expected_at_end(seen) if self.from_scratch else None
        return {"expected_tokens_per_cycle": expected} if expected else {}
