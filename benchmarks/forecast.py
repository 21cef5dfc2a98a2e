"""Fits what `domino train` says beforehand, and while it trains, to the runs on record."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import Record, recipe_target, table
from domino_spec.records import read_records
from domino_spec.training.config import BASELINES, renamed
from domino_spec.training.forecast import FIT, REFERENCE, Fit, expected_at_end

MARKS = (0.1, 0.2, 0.3, 0.5)
"""Shares of a run from which on its estimate is judged."""
_USEFUL = 0.1  # estimates are told from where nine in ten are within
_STEP_TOKENS, _LENGTH = 16384, 1024  # a GPU's defaults


@dataclass(frozen=True)
class Curve:
    """What a run from random weights measured at its shares, the last one at its end."""

    lengths: dict[float, float]

    def growth(self) -> float:
        """Least squares of drafts(s) / drafts(1) = 1 + growth · ln s."""
        end = self.lengths[1.0] - 1
        points = [(math.log(s), (length - 1) / end - 1) for s, length in self.lengths.items()]
        return sum(x * y for x, y in points) / sum(x * x for x, _ in points)

    def errors(self, growth: float) -> list[float | None]:
        """How far off the first estimate from each mark on was; None where there was none."""
        exact = replace(FIT, growth=growth, errors=[(0.0, 0.0)])
        found: list[float | None] = []
        for mark, until in zip(MARKS, (*MARKS[1:], 1.0), strict=True):
            told = [
                expected_at_end(length, share, exact)
                for share, length in self.lengths.items()
                if mark <= share < until
            ]
            first = next((expected[0] for expected in told if expected), None)
            found.append(None if first is None else first / self.lengths[1.0] - 1)
        return found


def curve(reports: list[Record]) -> Curve | None:
    """Of a run's evaluations, which must be more than one at its end."""
    found = {r["step"]: r["tokens_per_cycle"] for r in reports if "tokens_per_cycle" in r}
    last = max((r["step"] for r in reports), default=0)
    if len(found) < 2 or last not in found:
        return None
    return Curve({step / last: length for step, length in found.items()})


def curves(records: Path) -> list[Curve]:
    """The runs of the recipe, and the release runs from random weights."""
    logs = [run["reports"] for run in recipe_runs(records)]
    released = read_records(records / "release.jsonl")
    logs += [run["curve"] for run in released if not run["settings"].get("init")]
    return [found for found in map(curve, logs) if found]


def recipe_runs(records: Path) -> list[Record]:
    """Runs of block drafters of the base size from random weights, by today's recipe."""
    return [
        run
        for run in read_records(records / "recipe.jsonl")
        if "acceptance_length" in run
        and "tried" not in run
        and settings(run).get("variant") not in BASELINES
        and settings(run).get("size", "base") == "base"
        and not settings(run).get("init")
    ]


def settings(run: Record) -> dict[str, Any]:
    """All that a run was given."""
    return renamed({**run.get("base", {}), **run["settings"]})


def tokens(run: Record) -> float:
    """How many it read, padding included."""
    given = settings(run)
    length = given.get("length") or _LENGTH
    rows = given.get("batch_size") or max(1, _STEP_TOKENS // length)
    return float(run["steps"] * rows * length * given.get("accumulate", 1))


def exponent(records: Path) -> float:
    """Of tokens in drafts: least squares among runs that differ in little else than length."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for run in recipe_runs(records):
        length = run["acceptance_length"]["held-out"]["on"]
        groups[recipe_target(run), settings(run).get("variant")].append((tokens(run), length))
    for run in read_records(records / "ablations.jsonl"):
        length = run["tokens_per_cycle"]["held-out"]["on"]
        groups[settings(run).get("variant", "domino")].append((tokens(run), length))
    for run in read_records(records / "head_to_head_train.jsonl"):
        if run["stage"] == "full" and run["kind"] in groups:
            groups[run["kind"]].append((tokens(run), run["held_out"]["tokens_per_cycle"]))
    over = under = 0.0
    for points in groups.values():
        x, y = np.log([(t, length - 1) for t, length in points]).T
        over += ((x - x.mean()) * (y - y.mean())).sum()
        under += ((x - x.mean()) ** 2).sum()
    return over / under


def judged(records: Path) -> list[list[float]]:
    """At each mark, every run's error where the other runs' growth was used for it."""
    runs = curves(records)
    growths = [run.growth() for run in runs]
    errors = [
        run.errors(statistics.median(growths[:i] + growths[i + 1 :])) for i, run in enumerate(runs)
    ]
    return [[e for e in at if e is not None] for at in zip(*errors, strict=True)]


def fit(records: Path) -> Fit:
    """The constants."""
    runs, power = recipe_runs(records), exponent(records)
    lengths = [run["acceptance_length"]["held-out"]["on"] for run in runs]
    read = list(map(tokens, runs))
    drafts = [(a - 1) * (REFERENCE / t) ** power for a, t in zip(lengths, read, strict=True)]
    at_marks = judged(records)
    off = [float(np.quantile(np.abs(at), 0.9)) if len(at) > 1 else math.inf for at in at_marks]
    useful = max((i + 1 for i, error in enumerate(off) if error > _USEFUL), default=0)
    off = [max(off[i:]) for i in range(len(off))]  # fewer runs early on: never surer than later
    return Fit(
        growth=round(statistics.median(run.growth() for run in curves(records)), 3),
        errors=[(m, round(e, 3)) for m, e in zip(MARKS, off, strict=True)][useful:],
        exponent=round(power, 3),
        drafts=(round(min(drafts), 3), round(max(drafts), 3)),
        tokens=(min(read), max(read)),
        runs=len(runs),
        targets=sorted({recipe_target(run) for run in runs}),
    )


def fit_text(records: Path) -> str:
    """forecast.json."""
    return json.dumps(asdict(fit(records)), indent=1) + "\n"


def with_table(guide: str, records: Path) -> str:
    """docs/training.md with the table of errors that follows from the records."""
    made = errors_table(records)
    header = re.escape(made.splitlines()[0])
    return re.sub(rf"^{header}\n(\|.*\n)+", made + "\n", guide, flags=re.MULTILINE)


def errors_table(records: Path) -> str:
    """How far off the estimates of the runs on record were."""
    rows = [
        {"at": mark, "off": [abs(error) for error in at]}
        for mark, at in zip(MARKS, judged(records), strict=True)
    ]
    return table(
        {
            "from this part of the run on": lambda r: f"{r['at']:.0%}",
            "runs": lambda r: str(len(r["off"])),
            "median error": lambda r: f"{statistics.median(r['off']):.1%}",
            "largest error": lambda r: f"{max(r['off']):.1%}",
        },
        rows,
    )
