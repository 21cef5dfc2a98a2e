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


def expected_at_end(length: float, share: float, fit: Fit = FIT) -> list[float] | None:
    """The range of acceptance lengths at the end, from one at a share of the run.

    None too early, and at the end itself.
    """
    errors = [error for begins, error in fit.errors if share >= begins]
    grown = 1 + fit.growth * math.log(share) if share else 0.0
    if not errors or share >= 1 or grown <= 0:
        return None
    end = 1 + (length - 1) / grown
    return [round(max(1.0, end * (1 + sign * errors[-1])), 3) for sign in (-1, 1)]


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

    def at_end(self, length: float, share: float) -> dict[str, Any]:
        """The acceptance length to expect, from that at a share of the run."""
        expected = expected_at_end(length, share) if self.from_scratch else None
        return {"expected_tokens_per_cycle": expected} if expected else {}
