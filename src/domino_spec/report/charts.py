"""The charts of a run, drawn by matplotlib: SVG for the page, PNG for slides and papers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from domino_spec.bench.statistics import Interval
from domino_spec.bench.summary import ALL, CellSummary, RunSummary
from domino_spec.bench.tables import plain_interval, times
from domino_spec.drafters import PLAIN
from domino_spec.errors import InputError

WIDTH = 360
"""Points; narrow enough for a phone."""
_PAD = 4
_FONT = 12
_DPI = 160
_TITLE_HEIGHT = 28
_LONGEST_NAME = 27
_INK, _RULE = "#16191f", "#d9dde4"
_METHODS = ("#646c7a", "#1c5fd0", "#b05300", "#0a756f", "#7338ad", "#ac2a68", "#656500", "#764626")
_STAGES = {"draft": "#0a8078", "verify": "#4338b8", "other": "#8a919e"}
_DASHES = (":", "-", "--", "-.") * 2
_MARKERS = "os^Dv<>X"
_PAGE_COLOURS = {
    _INK: "var(--ink)",
    _RULE: "var(--rule)",
    **{colour: f"var(--m{index})" for index, colour in enumerate(_METHODS)},
    **{colour: f"var(--s-{stage})" for stage, colour in _STAGES.items()},
}
"""The page has each colour once for light and once for dark screens."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads and lines."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: words, the same figures as a table, and how to paint it."""

    slug: str
    title: str
    where: str
    """Temperature and batch size, or how long answers were."""
    caption: str
    table: Table
    height: float
    paint: Callable[[Any], None]
    """Draws on axes whose units are points, y from the top."""

    def svg(self, name: str) -> str:
        """An element for the page; `name` makes its ids unique there."""
        buffer = io.BytesIO()
        self._save(buffer, title=False, format="svg", transparent=True)
        root = ElementTree.fromstring(buffer.getvalue())
        for child in root.findall(f"{{{_SVG}}}metadata"):
            root.remove(child)
        for element in root.iter():
            # matplotlib numbers its groups from 1 in each chart; markers and clips have hashes.
            if re.fullmatch(r"[\w.]+_\d+", element.get("id", "")):
                del element.attrib["id"]
            if "style" in element.attrib:
                style = re.sub(r"font(-family)?: [^;]*'[^;]*(;|$)", "", element.attrib["style"])
                element.set(
                    "style",
                    re.sub(r"#\w{6}", lambda found: _PAGE_COLOURS.get(found[0], found[0]), style),
                )
        for key in ("width", "height"):
            del root.attrib[key]
        heads, lines = self.table
        words = ". ".join(
            "; ".join(f"{head}: {cell}" for head, cell in zip(heads, line, strict=True))
            for line in lines
        )
        for tag, text in (("desc", words), ("title", f"{self.title}, {self.where}")):
            element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
            element.text = text
            root.insert(0, element)
        root.attrib |= {"role": "img", "aria-labelledby": f"{name}-title {name}-desc",
                        "data-chart": self.slug}  # fmt: skip
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)

    def write_png(self, path: Path) -> None:
        """A picture with its title."""
        self._save(path, title=True, dpi=_DPI)

    def _save(self, out: Any, *, title: bool, **options: Any) -> None:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise InputError(
                "charts need matplotlib; pip install 'domino-spec[report]'."
            ) from error
        height = self.height + (_TITLE_HEIGHT if title else 0)
        # Text stays text; names in records are never taken for mathematics.
        style: Any = {"svg.fonttype": "none", "text.parse_math": False, "font.size": _FONT,
                 "text.color": _INK, "axes.labelcolor": _INK, "xtick.labelcolor": _INK,
                 "ytick.labelcolor": _INK}  # fmt: skip
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(WIDTH / 72, height / 72))
            axes = figure.add_axes((0, 0, 1, self.height / height))
            axes.set(xlim=(0, WIDTH), ylim=(self.height, 0))
            axes.axis("off")
            if title:
                figure.text(_PAD / WIDTH, 1 - 18 / height, f"{self.title} ({self.where})")
            self.paint(axes)
            figure.savefig(out, **options)


def charts(run: RunSummary) -> list[Chart]:
    """All charts that the run's records allow, by temperature."""
    found: list[Chart] = []
    styles = {method: (i, i, i) for i, method in enumerate(run.methods)}
    for temperature in sorted({t for t, _ in run.points}):
        sizes = sorted(size for t, size in run.points if t == temperature)
        by_size = {s: [c for c in run.at(temperature, s) if c.lines] for s in sizes}
        cells = by_size[sizes[0]]
        if not cells:
            continue
        where = f"T {temperature:g}, batch size {sizes[0]}"
        tag = f"t{temperature:g}".replace(".", "-")
        if len(run.methods) > 1:
            found.append(_bars(
                run, cells, "speed_up", times, slug=f"speedup-{tag}", title="Speedup", where=where,
                caption="Tokens per second over our plain decoding's in the same run, from the "
                "prompt to the last token. The dashed line is plain decoding: a bar that ends "
                "short of it is slower. Whiskers are 95% intervals.",
            ))  # fmt: skip
            found.append(_bars(
                run, cells, "tokens_per_cycle", plain_interval, slug=f"acceptance-length-{tag}",
                title="Acceptance length", where=where,
                caption="Mean tokens per cycle, the target's own token included, the prefill's "
                "token not. The dashed line is plain decoding's one.",
            ))  # fmt: skip
        overall = _overall(cells)
        found += line_charts(
            {li.method: dict(enumerate(li.counts.acceptance_by_position, start=1))
             for li in overall.lines},
            styles=styles, percent=True, x_label="position in the block",
            slug=f"acceptance-rate-{tag}", title="Acceptance rate by position", where=where,
            caption="Share of the drafts verified at each position of a block that were accepted "
            f"({overall.cell.task}). A draft counts only if all earlier ones were accepted.",
        )  # fmt: skip
        found += _cycle_time(run, overall, where, tag)
        several = {s: _overall(c) for s, c in by_size.items() if c and len(sizes) > 1}
        found += line_charts(
            {m: {s: at.line(m).tokens_per_second for s, at in several.items()}
             for m in run.methods},
            styles=styles, x_label="batch size", slug=f"throughput-{tag}",
            title="Throughput by batch size", where=f"T {temperature:g}",
            caption="Tokens per second of the whole batch, all tasks, prefill included. A batch "
            "ends when its last sequence does.",
        )  # fmt: skip
    return found


def _bars(
    run: RunSummary, cells: Sequence[CellSummary], figure: str, shown: Callable[[Interval], str],
    **words: str,
) -> Chart:  # fmt: skip
    groups = [
        (c.cell.task, [(li.method, getattr(li, figure)) for li in c.lines if li.method != PLAIN])
        for c in cells
    ]
    flat = [(task, method, found) for task, bars in groups for method, found in bars]
    scale = (WIDTH - 2 * _PAD) / max([1.0, *(f.high or f.value for _, _, f in flat)])
    height = 20.0 + 24 * len(groups) + 36 * len(flat)

    def paint(axes: Any) -> None:
        y = 4.0
        for task, bars in groups:
            y += 16
            axes.text(_PAD, y, task, weight="bold")
            for method, found in bars:
                y += 19
                axes.text(_PAD, y, _shortened(method))
                axes.text(WIDTH - _PAD, y, shown(found), ha="right")
                y += 6
                colour = _METHODS[run.methods.index(method) % len(_METHODS)]
                axes.barh(y + 5.5, found.value * scale, left=_PAD, height=11, color=colour)
                if found.low is not None and found.high is not None:
                    ends = [_PAD + found.low * scale, _PAD + found.high * scale]
                    axes.plot(ends, [y + 5.5] * 2, color=_INK, marker="|", linewidth=1.4)
                # At the bars alone, so that names stay readable.
                axes.plot([_PAD + scale] * 2, [y - 3, y + 14], color=_INK, linestyle="--",
                          linewidth=1.4)  # fmt: skip
                y += 11
            y += 8
        right = scale > WIDTH / 2
        x = _PAD + scale + (-4 if right else 4)
        axes.text(x, y + 10, "plain decoding", ha="right" if right else "left")

    lines = [(task, method, shown(found)) for task, method, found in flat]
    table = (("task", "method", words["title"].lower()), lines)
    return Chart(table=table, height=height, paint=paint, **words)


def line_charts(
    series: Mapping[str, Mapping[float, float]], *, styles: Mapping[str, tuple[int, int, int]],
    x_label: str, percent: bool = False, first_head: str = "method", **words: str,
) -> list[Chart]:  # fmt: skip
    """A chart of lines over the same places, or none; a style is colour, dashes and marker."""
    series = {name: points for name, points in series.items() if points}
    if not series:
        return []
    xs = sorted({x for points in series.values() for x in points})

    def shown(value: float) -> str:
        if percent:
            return f"{value:.0%}"
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    def paint(axes: Any) -> None:
        plot = axes.inset_axes((48, 10, WIDTH - 62, 180), transform=axes.transData)
        for name, points in series.items():
            colour, dashes, marker = (index % len(_METHODS) for index in styles[name])
            plot.plot(
                [xs.index(x) for x in points], list(points.values()), color=_METHODS[colour],
                linestyle=_DASHES[dashes], marker=_MARKERS[marker], label=_shortened(name),
                clip_on=False,
            )  # fmt: skip
        step = 1 if len(xs) <= 8 else 2
        plot.set_xticks(range(0, len(xs), step), [f"{x:g}" for x in xs[::step]])
        plot.set_xlabel(x_label)
        plot.set_ylim(0, 1 if percent else None)
        plot.yaxis.set_major_formatter(lambda value, _: shown(value))
        plot.grid(axis="y", color=_RULE)
        plot.tick_params(length=0)
        plot.spines[:].set_visible(False)
        axes.legend(*plot.get_legend_handles_labels(), loc="lower left", frameon=False)

    lines = [
        (name, *(shown(points[x]) if x in points else "–" for x in xs))
        for name, points in series.items()
    ]
    table = ((first_head, *(f"{x:g}" for x in xs)), lines)
    return [Chart(table=table, height=246.0 + 19 * len(series), paint=paint, **words)]


def _cycle_time(run: RunSummary, overall: CellSummary, where: str, tag: str) -> list[Chart]:
    bars = {
        line.method: (line.cycle.draft, line.cycle.verify, line.cycle.other)
        for line in overall.lines
        if line.cycle is not None
    }
    if not bars:
        return []
    scale = (WIDTH - 2 * _PAD) / (max(map(sum, bars.values())) or 1.0)

    def paint(axes: Any) -> None:
        y = 0.0
        for method, values in bars.items():
            y += 17
            axes.text(_PAD, y, _shortened(method))
            axes.text(WIDTH - _PAD, y, f"{sum(values):.2f} ms", ha="right")
            x = float(_PAD)
            for stage, value in zip(_STAGES, values, strict=True):
                axes.barh(y + 13.5, value * scale, left=x, height=15, color=_STAGES[stage],
                          label=stage if method == next(iter(bars)) else None)  # fmt: skip
                x += value * scale
            y += 26
        axes.legend(loc="lower left", ncols=len(_STAGES), frameon=False)

    how = (
        "Draft and verify were timed alone on the idle engine, greedily, with "
        f"{run.stage_context} tokens in the cache; other is the rest of the measured time."
        if run.stage_context is not None
        else "Each stage was timed inside the runs."
    )
    heads = ("method", *(f"{stage}, ms" for stage in _STAGES), "total, ms")
    lines = [(m, *(f"{v:.2f}" for v in (*values, sum(values)))) for m, values in bars.items()]
    return [
        Chart(
            slug=f"cycle-{tag}",
            title="Cycle time by stage",
            where=where,
            caption=f"Milliseconds of an average cycle, {overall.cell.task}. A cycle of plain "
            f"decoding gives one token, a drafter's gives its acceptance length. {how}",
            table=(heads, lines),
            height=43.0 * len(bars) + 36,
            paint=paint,
        )
    ]


def _overall(cells: Sequence[CellSummary]) -> CellSummary:
    """All tasks together, or the only one."""
    return next((c for c in cells if c.cell.task == ALL), cells[0])


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
