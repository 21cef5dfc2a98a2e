"""Acceptance length against seconds of training: the old recipe and the new, by target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import (
    NONE,
    Columns,
    Record,
    field,
    made_together,
    page,
    recipe_target,
    table,
)
from domino_spec.records import read_records

PICTURE = "time-to-acceptance.svg"
_MAIN = "smollm2-135m-instruct"
_NAMES = {_MAIN: "SmolLM2-135M-Instruct", "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder-1.5B"}
OLD, NEW = "AdamW, curriculum (2026-11-15)", "Muon, fixed λ (2026-11-17)"


@dataclass(frozen=True)
class Course:
    """One run's evaluations on held-out prompts."""

    target: str
    recipe: str
    points: list[Record]
    """Each with `seconds` of training and `tokens_per_cycle`."""
    environment: Record


def courses(records: Path) -> list[Course]:
    """Runs from random weights that were evaluated on their way."""
    return [*_released(records), *_searched(records)]


def _released(records: Path) -> Iterator[Course]:
    for run in read_records(records / "release.jsonl"):
        if run["name"] == _MAIN and run["curve"] and not run["settings"].get("init"):
            recipe = NEW if run["settings"].get("optimizer") == "muon" else OLD
            yield Course(_NAMES[_MAIN], recipe, run["curve"], run["environment"])


def _searched(records: Path) -> Iterator[Course]:
    for run in read_records(records / "recipe.jsonl"):
        if "tried" in run or run["settings"].keys() - {"variant"}:
            continue  # something else than the recipe
        seconds, points = 0.0, []
        for report in run.get("reports", ()):
            seconds = report.get("training_seconds", seconds)
            if "tokens_per_cycle" in report:
                points.append({**report, "seconds": seconds})
        if points:
            name = recipe_target(run)
            kind = run["settings"].get("variant", "domino")
            recipe = NEW if kind == "domino" else f"{NEW}, {kind}"
            yield Course(_NAMES.get(name, name), recipe, points, run["environment"])


def time_to_acceptance(records: Path) -> str:
    """The page's part: picture, table, where it was measured."""
    found = courses(records)
    rows = [
        {"target": course.target, "recipe": course.recipe, **point}
        for course in found
        for point in course.points
    ]
    columns: Columns = {
        "target": field("target"),
        "recipe": field("recipe"),
        "seconds of training": field("seconds", ".0f"),
        "step": field("step"),
        "acceptance length, held out": field("tokens_per_cycle", ".2f"),
        "head off": lambda r: (
            f"{r['tokens_per_cycle_head_off']:.2f}" if "tokens_per_cycle_head_off" in r else NONE
        ),
    }
    return page(
        "## Time to acceptance",
        f"![Acceptance length against seconds of training]({PICTURE})",
        "Each run's own evaluations while it trained: 32 held-out prompts × 128 tokens, with AdamW "
        "24 × 96, and there the seconds count the compiler in. Both SmolLM2 runs have 30.7M "
        "parameters. The learning rate falls over a whole run, so a run as short as one of these "
        "points would have reached more by then. With the larger target the old recipe has not "
        "been evaluated during a run.",
        *(made_together([{"environment": course.environment}]) for course in found),
        table(columns, rows),
    )


def draw(records: Path, path: Path) -> None:
    """A panel a target."""
    import matplotlib
    from matplotlib.figure import Figure

    found = courses(records)
    targets = dict.fromkeys(course.target for course in found)
    recipes = dict.fromkeys(course.recipe for course in found)
    colours = {recipe: f"C{index}" for index, recipe in enumerate(recipes)}
    with matplotlib.rc_context({"svg.hashsalt": PICTURE, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, len(targets), sharey=True, squeeze=False)[0]
        for axes, target in zip(panels, targets, strict=True):
            for course in found:
                if course.target == target:
                    places = [point["seconds"] for point in course.points]
                    lengths = [point["tokens_per_cycle"] for point in course.points]
                    colour = colours[course.recipe]
                    axes.plot(places, lengths, marker="o", color=colour, label=course.recipe)
            axes.set(title=target, xlabel="seconds of training, one H200", xlim=(0, None))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        panels[0].set_ylabel("acceptance length, held out")
        figure.savefig(path, metadata={"Date": None})
