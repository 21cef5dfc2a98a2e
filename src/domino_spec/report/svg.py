"""Charts as inline SVG: narrow enough for a phone, colours from the page, text escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from domino_spec.report.figures import Bars, Figure, Lines, Stacks

WIDTH = 360
_PAD = 4
_RIGHT = WIDTH - _PAD
_LONGEST_NAME = 27
COLOURS = 8
"""Methods with a colour and a mark of their own; more begin again."""


def draw(figure: Figure, methods: Sequence[str], name: str) -> str:
    """The chart; `name` makes its ids unique in the page."""
    if isinstance(figure, Bars):
        height, body = _bars(figure, methods)
    elif isinstance(figure, Stacks):
        height, body = _stacks(figure)
    else:
        height, body = _lines(figure, methods)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-t {name}-d" data-chart="{escape(figure.slug)}">'
        f'<title id="{name}-t">{escape(f"{figure.title}, {figure.where}")}</title>'
        f'<desc id="{name}-d">{escape(_described(figure))}</desc>{body}</svg>'
    )


def _described(figure: Figure) -> str:
    """The chart in words, for who cannot see it."""
    heads, rows = figure.table()
    lines = ["; ".join(f"{h}: {c}" for h, c in zip(heads, row, strict=True)) for row in rows]
    return ". ".join(lines)


def _bars(figure: Bars, methods: Sequence[str]) -> tuple[float, str]:
    parts: list[str] = []
    scale = (_RIGHT - _PAD) / figure.longest
    # The line is drawn at the bars alone: names must stay readable.
    line, ticks = _PAD + figure.reference * scale, []
    y = 4.0
    for name, bars in figure.groups:
        y += 16
        parts.append(_text(_PAD, y, name, "group"))
        for bar in bars:
            index = methods.index(bar.method)
            y += 19
            parts.append(_text(_PAD, y, _shortened(bar.method), "name", full=bar.method))
            parts.append(_text(_RIGHT, y, bar.text, "value", end=True))
            y += 6
            parts.append(
                f'<rect class="m{index % COLOURS}" x="{_PAD}" y="{y:.1f}" '
                f'width="{bar.found.value * scale:.2f}" height="11" rx="2" '
                f'data-method="{escape(bar.method)}" data-group="{escape(name)}" '
                f'data-value="{bar.found.value:.6g}"/>'
            )
            ticks.append(f"M{line:.2f} {y - 3:.1f}v17")
            if bar.found.low is not None and bar.found.high is not None:
                low, high = (_PAD + x * scale for x in (bar.found.low, bar.found.high))
                mid = y + 5.5
                parts.append(
                    f'<path class="whisker" d="M{low:.2f} {mid}H{high:.2f}M{low:.2f} {mid - 4}v8'
                    f'M{high:.2f} {mid - 4}v8"/>'
                )
            y += 11
        y += 8
    reference = f'<path class="reference" d="{"".join(ticks)}M{line:.2f} {y - 5:.1f}v8"/>'
    anchor = "end" if line > WIDTH / 2 else "start"
    shift = -4 if line > WIDTH / 2 else 4
    label = (
        f'<text class="small" x="{line + shift:.2f}" y="{y + 10:.1f}" text-anchor="{anchor}">'
        "plain decoding</text>"
    )
    return y + 16, "".join(parts) + reference + label


def _stacks(figure: Stacks) -> tuple[float, str]:
    parts: list[str] = []
    scale = (_RIGHT - _PAD) / (figure.longest or 1.0)
    y = 0.0
    for name, values in figure.rows:
        y += 17
        total = f"{sum(values):.2f} {figure.unit}"
        parts.append(_text(_PAD, y, _shortened(name), "name", full=name))
        parts.append(_text(_RIGHT, y, total, "value", end=True))
        y += 6
        x = float(_PAD)
        for part, value in zip(figure.parts, values, strict=True):
            parts.append(
                f'<rect class="s-{part}" x="{x:.2f}" y="{y:.1f}" width="{value * scale:.2f}" '
                f'height="15" data-method="{escape(name)}" data-part="{part}" '
                f'data-value="{value:.6g}"><title>{escape(name)}, {part}: {value:.2f} '
                f"{figure.unit}</title></rect>"
            )
            x += value * scale
        y += 20
    x, y = float(_PAD), y + 12
    for part in figure.parts:
        parts.append(f'<rect class="s-{part}" x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11"/>')
        parts.append(_text(x + 16, y, part, "small"))
        x += 24 + 8 * len(part)
    return y + 8, "".join(parts)


def _lines(figure: Lines, methods: Sequence[str]) -> tuple[float, str]:
    left, top, bottom = 42.0, 10.0, 190.0
    right = _RIGHT - 10.0
    xs = figure.xs
    ticks = _ticks(figure.highest)
    parts = []

    def across(value: float) -> float:
        if len(xs) == 1:
            return (left + right) / 2
        ends = (xs[0], value, xs[-1])
        low, here, high = map(math.log2, ends) if figure.doubling else ends
        return left + (here - low) / (high - low) * (right - left)

    def up(value: float) -> float:
        return bottom - value / ticks[-1] * (bottom - top)

    for tick in ticks:
        parts.append(f'<path class="grid" d="M{left} {up(tick):.1f}H{right}"/>')
        parts.append(_text(left - 6, up(tick) + 4, figure.label(tick), "small", end=True))
    shown = xs if len(xs) <= 8 else xs[::2]
    parts += [_text(across(x), bottom + 16, f"{x:g}", "small", middle=True) for x in shown]
    parts.append(_text((left + right) / 2, bottom + 34, figure.x_label, "small", middle=True))
    y = bottom + 44
    for name, points in figure.series:
        index = methods.index(name) % COLOURS
        path = "L".join(f"{across(a):.2f} {up(b):.2f}" for a, b in points)
        parts.append(
            f'<path class="line l{index}" d="M{path}" data-method="{escape(name)}" '
            f'stroke-dasharray="{_DASHES[index]}"/>'
        )
        parts += [_mark(index, across(a), up(b)) for a, b in points]
        y += 17
        dash = _DASHES[index]
        parts.append(
            f'<path class="line l{index}" d="M{left} {y - 4}h28" stroke-dasharray="{dash}"/>'
        )
        parts.append(_mark(index, left + 14, y - 4))
        parts.append(_text(left + 36, y, _shortened(name), "name", full=name))
    return y + 8, "".join(parts)


_DASHES = ("2 4", "", "7 3", "10 3 2 3", "", "7 3", "10 3 2 3", "2 3")
_SHAPES = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", "M-3.2-3.2h6.4v6.4h-6.4z", "M0-4.4L4 3H-4z",
    "M0-4.6L4.4 0L0 4.6L-4.4 0z", "M-4-3H4L0 4.4z", "M-4.5-1.4h9v2.8h-9z", "M-1.4-4.5h2.8v9h-2.8z",
    "M-3.6-3.6L3.6 3.6M3.6-3.6L-3.6 3.6",
)  # fmt: skip


def _mark(index: int, x: float, y: float) -> str:
    """Each method's own shape: colour alone tells nothing to who cannot see it."""
    return (
        f'<path class="mark m{index} l{index}" transform="translate({x:.2f} {y:.2f})" '
        f'd="{_SHAPES[index]}"/>'
    )


def _ticks(highest: float) -> list[float]:
    """Round steps from 0 to a little above the highest value."""
    if highest <= 0:
        return [0.0, 1.0]
    raw = highest / 4
    unit: float = 10.0 ** math.floor(math.log10(raw))
    step = next(f * unit for f in (1, 2, 2.5, 5, 10) if f * unit >= raw * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _text(
    x: float, y: float, words: str, kind: str, *, full: str | None = None,
    end: bool = False, middle: bool = False,
) -> str:  # fmt: skip
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    title = f"<title>{escape(full)}</title>" if full is not None and full != words else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(words)}{title}</text>'


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
