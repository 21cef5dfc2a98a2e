"""How a training run looks: a live panel on a terminal, lines or JSON elsewhere."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from domino_spec.cli.voice import Voice
    from domino_spec.training import TrainConfig

_SHADES = " ▁▂▃▄▅▆▇█"


class LineView:
    """One line a report: for logs, and JSON for machines."""

    def __init__(self, voice: Voice, *, silent: bool = False) -> None:
        self._voice = voice
        self._silent = silent or (voice.quiet and not voice.as_json)
        self._total = 0

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, config: TrainConfig, step: int) -> None:  # noqa: ARG002
        """The run is known."""
        self._total = config.steps or 0

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Say it."""
        if self._silent:
            return
        if self._voice.as_json:
            sys.stdout.write(json.dumps({"step": step, **values}) + "\n")
            sys.stdout.flush()
            return
        self._voice.err.print(f"step {step}/{self._total}: {summary(values)}", soft_wrap=True)

    def close(self) -> None:
        """The run is over."""


class LiveView:
    """A bar, the numbers that matter, and accuracy by position as a row of blocks."""

    def __init__(self, voice: Voice) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=voice.err,
        )
        self._values: dict[str, Any] = {}
        self._live = Live(console=voice.err, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, config: TrainConfig, step: int) -> None:
        """The run is known."""
        self._task = self._bar.add_task("training", total=config.steps, completed=step)

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Show it."""
        self._bar.update(self._task, completed=step)
        self._values |= values

    def close(self) -> None:
        """The run is over."""
        self._live.refresh()

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, value in rows(self._values):
            table.add_row(Text(name, style="dim"), Text(value))
        return Group(self._bar, table)


def rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown of a report, in words."""
    shown = [
        ("loss", "loss", "{:.4f}"),
        ("λ", "lambda", "{:.3f}"),
        ("learning rate", "learning_rate", "{:.2e}"),
        ("right in a row, teacher forced", "run_length", "{:.3f}"),
        ("conversations a second", "conversations_per_second", "{:.1f}"),
        ("tokens a cycle, held out", "tokens_per_cycle", "{:.3f}"),
        ("the same with the head off", "tokens_per_cycle_head_off", "{:.3f}"),
    ]
    lines = [(label, form.format(values[name])) for label, name, form in shown if name in values]
    if "accuracy" in values:
        lines.append(("accuracy by draft", f"{blocks(values['accuracy'])}  {percent(values)}"))
    return lines


def summary(values: dict[str, Any]) -> str:
    """A report on one line."""
    return ", ".join(f"{label} {value}" for label, value in rows(values))


def blocks(shares: list[float]) -> str:
    """A row of bars, one a position."""
    last = len(_SHADES) - 1
    return "".join(_SHADES[round(min(1.0, max(0.0, share)) * last)] for share in shares)


def percent(values: dict[str, Any]) -> str:
    """First and last position's accuracy as numbers."""
    accuracy = values["accuracy"]
    return f"{accuracy[0]:.0%} … {accuracy[-1]:.0%}"
