"""Where a run's settings come from: a saved run, a file, flags, --set; the later wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError, TrainingError

# Naming one of these leaves no room for what an earlier layer said of the other.
_REPLACES = {
    "epochs": ("steps", "max_seconds"),
    "steps": ("epochs", "max_seconds"),
    "max_seconds": ("steps", "epochs"),
    "taps": ("target_layer_ids",),
}
_NEEDED = {"target": "the TARGET", "data": "--data", "out": "--out"}


def gather(
    flags: Mapping[str, Any],
    groups: Sequence[Any],
    *,
    config: Path | None,
    assignments: Sequence[str],
    resume: bool,
) -> dict[str, Any]:
    """All settings that were given, as plain values; unset flags say nothing."""
    from domino_spec.training.config import parse_assignments, read_settings

    given = dict(flags)
    for group in groups:
        given |= dataclasses.asdict(group)
    stated = {name: _plain(value) for name, value in given.items() if value is not None}
    values: dict[str, Any] = {}
    for layer in (read_settings(config) if config else {}, stated, parse_assignments(assignments)):
        values = _over(values, layer)
    if resume:
        values = _over(_saved(values.get("out")), values)
    missing = [how for name, how in _NEEDED.items() if not values.get(name)]
    if missing:
        raise InputError(
            f"training needs {_listed(list(_NEEDED.values()))}; give {_listed(missing)}, here or "
            "in a file with --config."
        )
    return values


def check_installed(*, tensorboard: bool) -> None:
    """Refuse before anything is loaded what would fail later."""
    advice = "pip install 'domino-spec[train]'"
    if find_spec("yaml") is None:
        raise TrainingError(
            f"PyYAML is not installed, and training keeps its settings in it; {advice}."
        )
    if tensorboard and find_spec("tensorboard") is None:
        raise TrainingError(
            f"TensorBoard is not installed; {advice}, or train with --no-tensorboard."
        )


def _over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    stated = [others for name, others in _REPLACES.items() if upper.get(name) is not None]
    replaced = {other for others in stated for other in others}
    return {k: v for k, v in lower.items() if k not in replaced} | dict(upper)


def _saved(out: str | None) -> dict[str, Any]:
    from domino_spec.training.config import read_settings
    from domino_spec.training.prepare import CONFIG_FILE
    from domino_spec.training.state import Checkpoints

    if not out:
        raise InputError("there is no folder of a run to go on with; give --out.")
    saved = Path(out) / CONFIG_FILE
    if not saved.is_file() or not Checkpoints(Path(out), keep=1).steps():
        raise TrainingError(
            f"{out} holds no run to go on with (expected {CONFIG_FILE} and a checkpoint there); "
            "name the run's folder with --out, or start it without --resume."
        )
    return read_settings(saved)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
