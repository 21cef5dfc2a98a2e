"""A run's figures as Markdown, for the results page and for terminals without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from domino_spec.bench.settings import LLAMA_CPP
from domino_spec.bench.statistics import Interval
from domino_spec.bench.summary import CellSummary, Line, RunSummary

HEADS = ("task", "T", "batch size", "method", "speedup", "decode speedup", "acceptance length",
         "tokens/s", "same text")  # fmt: skip
OVER_HEADS = ("task", "T", "batch size", "method", "over", "speedup", "decode speedup")
TAKING_PART_HEADS = ("method", "kind", "settings", "own weights", "peak memory, all loaded",
                     "fingerprint")  # fmt: skip
LEFT_OUT_HEADS = ("task", "T", "batch size", "used", "loops", "short", "too long", "left over")
_LOOPS = {
    "fast": "the engine (plain: the same engine without a drafter, over the same weights)",
    "lean": "the reference loop over the engine's forward (plain: the same without drafts)",
    "reference": "the reference loop through Transformers (plain: the same loop without drafts)",
}


KINDS = {
    "plain": "plain decoding",
    "lookup": "prompt lookup",
    "domino": "Domino",
    "dflash": "DFlash",
    "markov": "Markov head",
    "medusa": "Medusa, drafting a chain",
    "eagle3": "EAGLE-3, drafting a chain",
    LLAMA_CPP: "another implementation",
}
"""What a kind is called; the last two are published with trees; here every method verifies one
chain."""


def markdown(runs: Sequence[RunSummary]) -> str:
    """Every run: how it was measured, then its tables."""
    return "\n\n".join(part for run in runs for part in _run(run))


def _run(run: RunSummary) -> list[str]:
    return [
        how_measured(run),
        " ".join(circumstances(environment) for environment in run.environments),
        table(TAKING_PART_HEADS, taking_part_rows(run)),
        table(HEADS, method_rows(run)),
        *([table(OVER_HEADS, over_rows(run))] if over_rows(run) else []),
        "Excluded prompts (a loop flatters any drafter, a short answer says little):",
        table(LEFT_OUT_HEADS, left_out_rows(run)),
    ]


def how_measured(run: RunSummary) -> str:
    """In words, from the settings."""
    target, settings = run.facts["target"], run.settings
    depth = " Depth is chosen cycle by cycle." if settings["adaptive"] else ""
    count = settings["repeats"]
    repeats = "one run" if count == 1 else f"the median of {count} runs"
    sampled = any(temperature for temperature, _ in run.points)
    others = _other_implementations(run)
    accept = f" Sampled drafts are accepted by the {settings['accept']} rule." if sampled else ""
    return (
        f"{target['name']}, {target['dtype']} on {target['device']}; "
        f"{'our' if others else 'all'} methods on {_LOOPS[settings['engine']]}.{others} Up to "
        f"{settings['max_new_tokens']} new tokens; {repeats} a prompt, methods in turns on each "
        f"batch after {settings['warm_up']} to warm up; 95% bootstrap intervals over prompts (over "
        f"batches where prompts share one).{depth}{accept}"
    )


def _other_implementations(run: RunSummary) -> str:
    """What else answered, and how far it compares."""
    others = [
        f"{method['name']} ({method['settings']['by']} {method['settings']['version']}, threads: "
        f"{method['settings']['threads']})"
        for method in run.facts["methods"]
        if method["kind"] == LLAMA_CPP
    ]
    if not others:
        return ""
    return (
        f" In turns with them {' and '.join(others)}: the same file and token ids, greedily, as "
        "many new tokens as plain decoding gave, without HTTP. Another implementation rounds "
        "differently: how many of its texts are the same says nothing about losslessness."
    )


def circumstances(environment: Mapping[str, Any]) -> str:
    """How the records were made."""
    versions = environment["versions"]
    return (
        f"`{environment['command']}`, commit {environment['commit']}, {environment['hardware']}, "
        f"Python {environment['python']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {environment['date']}."
    )


def method_rows(run: RunSummary) -> list[list[str]]:
    """A line for each method in each cell, then over all tasks."""
    rows = []
    for temperature, batch_size in run.points:
        for summary in run.at(temperature, batch_size):
            rows += [[*_place(summary), *_figures(line)] for line in summary.lines]
    return rows


def over_rows(run: RunSummary) -> list[list[str]]:
    """The same for methods of ours over each other implementation of the run."""
    return [
        [*_place(summary), line.method, other, *map(times, found)]
        for temperature, batch_size in run.points
        for summary in run.at(temperature, batch_size)
        for line in summary.lines
        for other, found in line.over.items()
    ]


def taking_part_rows(run: RunSummary) -> list[list[str]]:
    """Names, kinds, settings and weights, and the most memory in use while each ran."""
    peaks: dict[str, int] = {}
    for line in (line for cell in run.cells for line in cell.lines):
        peaks[line.method] = max(peaks.get(line.method, 0), line.peak_memory or 0)
    rows = []
    for method in run.facts["methods"]:
        settings = ", ".join(f"{k} {v}" for k, v in method["settings"].items() if v is not None)
        rows.append([
            method["name"], KINDS.get(method["kind"], method["kind"]), settings or "–",
            _size(method["nbytes"]), _size(peaks.get(method["name"], 0)),
            method["fingerprint"][:12],
        ])  # fmt: skip
    return rows


def left_out_rows(run: RunSummary) -> list[list[str]]:
    """How many prompts of each cell count, and why the others do not."""
    return [
        [*_place(s), *map(str, (s.used, s.loops, s.short, s.too_long, s.left_over))]
        for s in run.cells
    ]


def _place(summary: CellSummary) -> list[str]:
    cell = summary.cell
    return [cell.task, f"{cell.temperature:g}", str(cell.batch_size)]


def _figures(line: Line) -> list[str]:
    return [
        line.method,
        times(line.speed_up),
        times(line.decoding_speed_up),
        plain_interval(line.tokens_per_cycle),
        f"{line.tokens_per_second:.1f}",
        f"{line.same} of {line.compared}" if line.compared else "–",
    ]


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count else "–"


def times(found: Interval) -> str:
    """A ratio: 1.42× (1.36 to 1.48)."""
    return _with_bounds(found, "×")


def plain_interval(found: Interval) -> str:
    """A number: 3.21 (3.02 to 3.40)."""
    return _with_bounds(found, "")


def _with_bounds(found: Interval, unit: str) -> str:
    text = f"{found.value:.2f}{unit}"
    if found.low is None or found.high is None or found.low == found.high:
        return text
    return f"{text} ({found.low:.2f} to {found.high:.2f})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
