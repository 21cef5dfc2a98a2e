"""How a training run looks: a live panel on a terminal, lines or JSON elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from domino_spec.cli.render import bar_line

if TYPE_CHECKING:
    from domino_spec.cli.voice import Voice
    from domino_spec.training import TrainConfig


class LineView:
    """One line a report: for logs, and JSON for machines."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._steps: int | None = None

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, config: TrainConfig, _step: int) -> None:
        """The run is known."""
        self._steps = config.steps

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Say it."""
        if self._voice.as_json:
            self._voice.document({"step": step, **finite(values)})
            return
        told = [f"{label} {value}" for label, value in report_lines(values)]
        if "seconds_left" in values:
            told.append(f"{clock(values['seconds_left'])} left")
        of = f"/{self._steps}" if self._steps else ""  # a run over seconds cannot know
        self._voice.note(f"step {step}{of}: {' · '.join(told)}")

    def close(self) -> None:
        """The run is over."""


class LiveView:
    """A bar, the numbers that matter, and accuracy by draft as bars."""

    def __init__(self, voice: Voice) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[times]}"),
            console=voice.err,
        )
        self._task = self._bar.add_task("training", total=None, times="")
        self._countdown = Countdown()
        self._values: dict[str, Any] = {}
        self._live = Live(console=voice.err, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, config: TrainConfig, step: int) -> None:
        """The run is known."""
        self._countdown = Countdown()
        self._bar.update(self._task, total=config.steps, completed=step)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Show it."""
        self._countdown.set(values.get("seconds_left"))
        self._bar.update(self._task, completed=step)
        self._values |= values
        if "tokens_per_cycle" in values:
            self._values["evaluated_at"] = step

    def close(self) -> None:
        """The run is over."""

    def render(self) -> Group:
        """The panel as it is now."""
        left = self._countdown.left()
        ahead = "" if left is None else f", {clock(left)} left"
        self._bar.update(self._task, times=f"{clock(self._countdown.elapsed())}{ahead}")
        table = Table.grid(padding=(0, 2))
        for name, value in report_lines(self._values) or [("", "the first report is to come")]:
            table.add_row(Text(name, style="dim"), Text(value))
        return Group(self._bar, table)


class Countdown:
    """Time passed, and time left between two reports that say it."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()
        self._due: float | None = None

    def set(self, seconds_left: float | None) -> None:
        """A report came; None says nothing new."""
        if seconds_left is not None:
            self._due = self._now() + seconds_left

    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self._began

    def left(self) -> float | None:
        """Seconds to go, or None where nothing was said yet."""
        return None if self._due is None else max(0.0, self._due - self._now())


def report_lines(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown of a report, in words."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("λ", "lambda", "{:.3f}"),
        ("learning rate", "learning_rate", "{:.2e}"),
    ]
    lines = [(label, form.format(values[name])) for label, name, form in shown if name in values]
    if "accuracy" in values:
        lines.append(("accuracy by draft", _shares(values["accuracy"])))
    if "run_length" in values:
        lines.append(("right in a row", f"{values['run_length']:.2f}"))
    if "conversations_per_second" in values:
        lines.append(("conversations a second", f"{values['conversations_per_second']:,.1f}"))
    if "peak_memory_bytes" in values:
        lines.append(("peak memory", f"{values['peak_memory_bytes'] / 1e9:.1f} GB"))
    if "tokens_per_cycle" in values:
        lines.append(("acceptance length, held out", acceptance_length(values)))
    if "plan" in values:
        lines.append(("about", plan_line(values["plan"])))
    if "expected_tokens_per_cycle" in values:
        lines.append(("expected at the end", _range(values["expected_tokens_per_cycle"])))
    return lines


def plan_line(plan: dict[str, Any]) -> str:
    """How long a run is, and what runs like it reached."""
    line = f"{plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']:g} epochs"
    if plan["expected_tokens_per_cycle"]:
        expected = _range(plan["expected_tokens_per_cycle"])
        line += f"; acceptance length to expect: {expected} ({plan['expected_from']})"
    return line


def acceptance_length(values: dict[str, Any]) -> str:
    """The held-out acceptance length, and what the backbone reaches alone."""
    notes = []
    if "tokens_per_cycle_head_off" in values:
        notes.append(f"{values['tokens_per_cycle_head_off']:.2f} with the head off")
    if "evaluated_at" in values:
        notes.append(f"at step {values['evaluated_at']}")
    return f"{values['tokens_per_cycle']:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def clock(seconds: float) -> str:
    """1:05 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def finite(value: Any) -> Any:
    """The same for JSON, which knows neither NaN nor infinity: null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _range(values: list[float]) -> str:
    return "–".join(f"{value:.1f}" for value in values)


def _shares(accuracy: list[float]) -> str:
    return f"|{bar_line(accuracy)}| {accuracy[0]:.0%} … {accuracy[-1]:.0%}"
