"""Where a run is written down: a JSONL log, TensorBoard, curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from domino_spec.errors import TrainingError

LOG_FILE = "log.jsonl"
CURVES_FILE = "curves.png"


class JsonlLog:
    """One line a report; a resumed run goes on in the same file, a fresh one begins it anew."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = not fresh and path.is_file() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("w" if fresh else "a", encoding="utf-8")
        if torn:  # killed while it wrote: what follows gets its own line
            self._file.write("\n")

    def report(self, step: int, values: dict[str, Any]) -> None:
        """Append."""
        rounded = {name: _rounded(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **rounded}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """The run is over."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard, from the first report on: a run that never began leaves no files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def report(self, step: int, values: dict[str, Any]) -> None:
        """One point on every curve."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        for name, value in values.items():
            if isinstance(value, list):
                for index, item in enumerate(value):
                    self._writer.add_scalar(f"{name}/{index + 1}", item, step)
            elif isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """The run is over."""
        if self._writer is not None:
            self._writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The reports of a run; where a resumed run repeats a step, the later one counts.

    A line that was never finished is left out.
    """
    reports: dict[tuple[int, bool], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        reports[values["step"], "loss" in values] = values
    return [reports[key] for key in sorted(reports)]


def draw_curves(log: Path, picture: Path) -> None:
    """Loss, accuracy by position and simulated acceptance over the run, as a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainingError("curves need matplotlib; pip install 'domino-spec[train]'.") from error

    reports = read_log(log)
    trained = [r for r in reports if "loss" in r]
    evaluated = [r for r in reports if "tokens_per_cycle" in r]
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, cycle = figure.subplots(1, 3)
    steps = [r["step"] for r in trained]
    loss.plot(steps, [r["loss"] for r in trained], label="loss")
    loss.set(xlabel="step", ylabel="loss", title="Loss (λ from 1 to 0)")
    share = loss.twinx()
    share.plot(steps, [r["lambda"] for r in trained], color="grey", linestyle=":", label="λ")
    share.set(ylim=(0, 1.05), ylabel="λ")
    for draft in (0, 1, 3, 7, 14):
        if trained and draft < len(trained[0]["accuracy"]):
            values = [r["accuracy"][draft] for r in trained]
            accuracy.plot(steps, values, label=f"draft {draft + 1}")
    accuracy.set(xlabel="step", title="Accuracy, teacher forced", ylim=(0, 1))
    if trained:
        accuracy.legend(fontsize=8)
    if evaluated:
        at = [r["step"] for r in evaluated]
        cycle.plot(at, [r["tokens_per_cycle"] for r in evaluated], marker="o", label="head on")
        if "tokens_per_cycle_head_off" in evaluated[0]:
            off = [r["tokens_per_cycle_head_off"] for r in evaluated]
            cycle.plot(at, off, marker="o", label="head off")
        cycle.legend(fontsize=8)
    cycle.set(xlabel="step", title="Simulated tokens a cycle, held out")
    figure.savefig(picture, dpi=110)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
