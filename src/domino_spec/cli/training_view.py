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
    from domino_spec.cli.command import Voice
    from domino_spec.training import TrainConfig

_MANY_EPOCHS = 16
"""With 2,000 answers the held-out acceptance length fell from 12 epochs on (docs/results)."""


class TrainingView:
    """An observer of a run that shows each report."""

    def __init__(self, voice: Voice) -> None:
        self._voice, self._values = voice, dict[str, Any]()
        self._steps: int | None = None
        self._began, self._due = time.monotonic(), math.nan
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("{task.fields[times]}"))  # fmt: skip
        self._bar = Progress(*columns, console=voice.err)
        self._task = self._bar.add_task("training", total=None, times="")
        self._live = Live(console=voice.err, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> TrainingView:
        if self._voice.shows_bars:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, config: TrainConfig, step: int) -> TrainingView:
        """The run is known."""
        self._steps = None if config.max_seconds else config.steps
        self._began = time.monotonic()
        self._bar.update(self._task, total=self._steps, completed=step)
        return self

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Show it."""
        if self._voice.as_json:
            self._voice.document({"step": step, **finite(values)})
        elif self._voice.shows_bars:
            self._bar.update(self._task, completed=step)
            self._values |= values
            if "tokens_per_cycle" in values:
                self._values["evaluated_at"] = step
            if "seconds_left" in values:
                self._due = time.monotonic() + values["seconds_left"]
        else:
            told = [f"{label} {value}" for label, value in report_lines(values)]
            if "seconds_left" in values:
                told.append(f"{clock(values['seconds_left'])} left")
            of = f"/{self._steps}" if self._steps else ""  # a run over seconds cannot know
            self._voice.note(f"step {step}{of}: {' · '.join(told)}")

    def close(self) -> None:
        """The run is over."""

    def render(self) -> Group:
        """The panel as it is now; the time left runs on between two reports that say it."""
        now = time.monotonic()
        left = "" if math.isnan(self._due) else f", {clock(max(0.0, self._due - now))} left"
        self._bar.update(self._task, times=f"{clock(now - self._began)}{left}")
        table = Table.grid(padding=(0, 2))
        for name, value in report_lines(self._values) or [("", "the first report is to come")]:
            table.add_row(Text(name, style="dim"), Text(value))
        return Group(self._bar, table)


def report_lines(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown of a report, in words."""
    return [
        (label, acceptance_length(values) if name == "tokens_per_cycle" else form(values[name]))
        for name, (label, form) in _REPORTED.items()
        if name in values
    ]


def plan_line(plan: dict[str, Any]) -> str:
    """How long a run is, and what runs like it reached."""
    line = f"{plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']:g} epochs"
    if plan["epochs"] > _MANY_EPOCHS:
        line += " (so many that a drafter overfits: give more data, or train for less)"
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


_REPORTED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "lambda": ("λ", "{:.3f}".format),
    "learning_rate": ("learning rate", "{:.2e}".format),
    "accuracy": ("accuracy by draft", _shares),
    "run_length": ("right in a row", "{:.2f}".format),
    "conversations_per_second": ("conversations a second", "{:,.1f}".format),
    "peak_memory_bytes": ("peak memory", lambda size: f"{size / 1e9:.1f} GB"),
    "tokens_per_cycle": ("acceptance length, held out", str),
    "plan": ("about", plan_line),
    "expected_tokens_per_cycle": ("expected at the end", _range),
}
