"""What the figures show, in sentences that claim no more than the intervals do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from domino_spec.bench import PLAIN, CellSummary, Line, RunSummary
from domino_spec.bench.statistics import FEWEST
from domino_spec.bench.summary import ALL
from domino_spec.bench.tables import times

_MANY = 0.25
_VERDICTS = {1: "faster", -1: "slower", 0: "no clear difference"}


@dataclass(frozen=True)
class Finding:
    """One sentence: what it is about, what was found, and whether that is good news."""

    subject: str
    found: str
    rest: str
    kind: str
    """faster or slower where that holds for every batch size, else unclear."""


def findings(run: RunSummary) -> list[Finding]:
    """For each drafter at each temperature: over all tasks, one row at a time and with more."""
    found = []
    for temperature in sorted({t for t, _ in run.points}):
        sizes = [size for t, size in run.points if t == temperature]
        wholes = [w for w in (_whole(run, temperature, size) for size in sizes) if w is not None]
        if wholes:
            found += [_finding(wholes, line) for line in wholes[0].lines if line.method != PLAIN]
    return found


def _whole(run: RunSummary, temperature: float, batch_size: int) -> CellSummary | None:
    """All tasks together, or the only one."""
    cells = [cell for cell in run.at(temperature, batch_size) if cell.lines]
    return next((c for c in cells if c.cell.task == ALL), cells[0] if cells else None)


def _finding(wholes: Sequence[CellSummary], line: Line) -> Finding:
    cell = wholes[0].cell
    pieces, verdicts = [], set()
    for whole in wholes:
        speed = whole.line(line.method).speed_up
        said = _VERDICTS[speed.verdict] if speed.low is not None else "no interval"
        verdicts.add(said)
        pieces.append(f"{said} with {_rows(whole.cell.batch_size)}: {times(speed)}")
    rest = (
        f"({cell.task}, T {cell.temperature:g}; {line.tokens_per_cycle.value:.2f} tokens a cycle "
        f"with {_rows(cell.batch_size)})"
    )
    if "no interval" in verdicts:
        rest += f". An interval takes {FEWEST} units of each task"
    alike = verdicts.pop() if len(verdicts) == 1 else "unclear"
    kind = alike if alike in ("faster", "slower") else "unclear"
    return Finding(line.method, "; ".join(pieces), rest, kind)


def _rows(size: int) -> str:
    return "1 row" if size == 1 else f"{size} rows"


def doubts(run: RunSummary) -> list[str]:
    """What a reader should know before believing the charts."""
    found = []
    lines = [line for cell in run.cells for line in cell.lines]
    for method in run.methods[1:]:
        mine = [line for line in lines if line.method == method and line.compared]
        differ = sum(line.compared - line.same for line in mine)
        if differ:
            found.append(
                f"{differ} of {sum(line.compared for line in mine)} answers of {method} differ "
                "from plain decoding's. In half precision near-ties round differently by the shape "
                "of a forward; in float32 on a CPU a difference would be a fault."
            )
    unsteady = {line.method for line in lines if not line.repeats_agree}
    found += [
        f"Repeats of {method} did not all give the same text."
        for method in run.methods
        if method in unsteady
    ]
    answered = sum(c.used + c.loops + c.short + c.left_over for c in run.cells)
    loops = sum(c.loops for c in run.cells)
    if loops > _MANY * answered:
        found.append(
            f"{loops} of {answered} plain answers were loops and were left out: this target "
            "repeats itself often, and the rest says less about it."
        )
    empty = [str(c.cell) for c in run.cells if not c.lines]
    if empty:
        found.append(f"No prompt counts in: {'; '.join(empty)}.")
    if any("+changes" in e["commit"] for e in run.environments):
        found.append("The code had changes that no commit holds.")
    if len(run.environments) > 1:
        found.append(f"The run was continued: {len(run.environments)} sittings, listed below.")
    return found
