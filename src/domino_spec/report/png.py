"""The same charts as pictures, for slides and papers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError
from domino_spec.report.figures import Bars, Figure, Lines, Stacks

_COLOURS = ("#646c7a", "#1c5fd0", "#b05300", "#0a756f", "#7338ad", "#ac2a68", "#656500", "#764626")
_STAGES = {"draft": "#0a8078", "verify": "#4338b8", "other": "#8a919e"}
_MARKS = "os^Dv_|x"
_DPI = 160


def draw_picture(figure: Figure, methods: Sequence[str], path: Path) -> None:
    """Write one chart."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise InputError("pictures need matplotlib; pip install 'domino-spec[report]'.") from error
    count = sum(len(bars) for _, bars in figure.groups) if isinstance(figure, Bars) else 4
    canvas = Canvas(figsize=(7, max(3.2, 0.42 * count + 1.4)), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    if isinstance(figure, Bars):
        _bars(axes, figure, methods)
    elif isinstance(figure, Stacks):
        _stacks(axes, figure)
    else:
        _lines(axes, figure, methods)
    axes.set_title(f"{figure.title} ({figure.where})", loc="left", fontsize=11, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=_DPI)


def _bars(axes: Any, figure: Bars, methods: Sequence[str]) -> None:
    flat = [(name, bar) for name, bars in figure.groups for bar in bars]
    for place, (_, bar) in enumerate(flat):
        found = bar.found
        axes.barh(place, found.value, color=_COLOURS[methods.index(bar.method) % len(_COLOURS)])
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [place, place], color="black", marker="|")
        axes.annotate(bar.text, (found.high or found.value, place), xytext=(5, -3),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.axvline(figure.reference, color="black", linestyle=":", linewidth=1)
    labels = [f"{name} · {bar.method}" for name, bar in flat]
    axes.set_yticks(range(len(flat)), labels, fontsize=8, parse_math=False)
    axes.set_xlim(0, figure.longest * 1.35)
    axes.invert_yaxis()


def _stacks(axes: Any, figure: Stacks) -> None:
    names = [name for name, _ in figure.rows]
    done = [0.0] * len(names)
    for index, part in enumerate(figure.parts):
        widths = [values[index] for _, values in figure.rows]
        axes.barh(range(len(names)), widths, left=done, color=_STAGES[part], label=part)
        done = [a + b for a, b in zip(done, widths, strict=True)]
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.set_xlabel(f"{figure.unit} a cycle")
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _lines(axes: Any, figure: Lines, methods: Sequence[str]) -> None:
    for name, points in figure.series:
        index = methods.index(name) % len(_COLOURS)
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=_COLOURS[index], marker=_MARKS[index], label=name)
    if figure.doubling:
        axes.set_xscale("log", base=2)
    axes.set_xticks(figure.xs, [f"{x:g}" for x in figure.xs])
    axes.minorticks_off()
    axes.set_ylim(0, figure.highest * 1.05)
    if figure.percent:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel(figure.x_label)
    axes.grid(axis="y", linewidth=0.4)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
