"""Checkpoints of a run: a drafter that loads as it is and what it takes to resume exactly."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.checkpoints import Provenance, save_drafter
from domino_spec.drafter.model import DraftModule, drafter_like
from domino_spec.errors import TrainingError
from domino_spec.training.config import BASELINES, TrainConfig, renamed
from domino_spec.training.trainer import Trainer

FOLDER = "checkpoints"
STATE_FILE = "trainer.pt"
_NAME = re.compile(r"^step-(\d{8})$")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All of a run that changes: λ, the learning rate and the anchors follow from the step."""

    step: int
    weights: dict[str, Tensor]
    optimiser: list[dict[str, Any]]
    data: dict[str, Any]
    settings: dict[str, Any]
    seconds: float = 0.0
    """Spent on training, which a schedule over seconds follows."""
    scales: dict[str, Tensor] | None = None
    """What masters are larger by than weights; None in older checkpoints."""


class Checkpoints:
    """A run's checkpoints: written under another name and renamed, the oldest removed last."""

    def __init__(self, out: Path, *, keep: int) -> None:
        self.folder = out / FOLDER
        self._keep = keep

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [_NAME.match(path.name) for path in self.folder.iterdir()]
        return sorted(
            int(match[1])
            for match in found
            if match and (self.folder / match[0] / STATE_FILE).is_file()
        )

    def path(self, step: int) -> Path:
        """Where a step's checkpoint is or will be."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        state: RunState,
        drafter: DraftModule,
        *,
        dtype: torch.dtype,
        provenance: Provenance | None,
    ) -> Path:
        """Write everything under another name, then give it its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.path(state.step)
        staging = self.folder / f".{final.name}.part"
        for abandoned in self.folder.glob(".step-*"):  # of saves that were interrupted
            shutil.rmtree(abandoned, ignore_errors=True)
        save_drafter(drafter, staging, provenance=provenance, dtype=dtype)
        with (staging / STATE_FILE).open("wb") as file:
            torch.save(vars(state), file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            shutil.rmtree(final)
        staging.rename(final)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return final

    def latest(self) -> RunState:
        """The newest complete checkpoint's state."""
        steps = self.steps()
        if not steps:
            raise TrainingError(
                f"{self.folder} holds no complete checkpoint to resume; start without resume."
            )
        path = self.path(steps[-1]) / STATE_FILE
        return RunState(**torch.load(path, map_location="cpu", weights_only=True))


# What may differ between a run and its continuation: where and how it runs, not what it learns.
_FREE = {"out", "device", "compile", "log_every", "eval_every", "eval_prompts", "eval_tokens",
         "save_every", "keep", "chunk_bytes", "diverge_factor", "target", "data"}  # fmt: skip


def as_it_ran(saved: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, with what was left open when that meant something else."""
    open_then = {"loss_vocab": 0, "concatenate": 0.0}  # all tokens, no conversation after another
    if saved.get("variant") not in BASELINES:
        open_then["sliding_window"] = 0  # the whole context
    return {**saved, **{n: v for n, v in open_then.items() if saved.get(n) is None}}


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to resume a run under other settings; older runs lack newer settings."""
    saved = {**TrainConfig.model_construct().to_dict(), **as_it_ran(renamed(saved))}
    changed = [
        f"{name} was {saved.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(set(saved) | set(now))
        if name not in _FREE and saved.get(name) != now.get(name)
    ]
    if changed:
        raise TrainingError(
            f"this run cannot be resumed with other settings: {'; '.join(changed)}. Use the saved "
            "configuration, or start another run (init takes the weights along)."
        )


DRAFTER_FOLDER = "drafter"


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Writes a run's checkpoints and its drafter. Every process calls it: each may hold a part."""

    out: Path
    checkpoints: Checkpoints
    dtype: torch.dtype
    settings: dict[str, Any]
    provenance: Provenance
    scales: dict[str, Tensor]

    def save(self, trainer: Trainer) -> Path | None:
        """A checkpoint of this step; None where another process writes it."""
        weights, optimiser = trainer.masters.state_dict(), trainer.optimiser.state_dict()
        if not trainer.world.leads:
            return None
        state = RunState(
            step=trainer.step,
            weights=weights,
            optimiser=optimiser,
            data=trainer.position,
            settings=self.settings,
            seconds=trainer.budget.seconds,
            scales=self.scales,
        )
        drafter = drafter_like(trainer.objective.drafter, weights)
        return self.checkpoints.save(state, drafter, dtype=self.dtype, provenance=self.provenance)

    def finish(self, trainer: Trainer) -> Path | None:
        """The trained drafter in its own kind's layout, with what was last measured of it."""
        weights = trainer.masters.state_dict(packed=True)
        if not trainer.world.leads:
            return None
        drafter = drafter_like(trainer.objective.drafter, weights)
        folder = self.out / DRAFTER_FOLDER
        provenance = replace(self.provenance, tokens_per_cycle=trainer.tokens_per_cycle)
        return save_drafter(drafter, folder, provenance=provenance, dtype=self.dtype)

    def restore(self, state: RunState, trainer: Trainer) -> None:
        """Resume exactly where a checkpoint was written."""
        trainer.budget.resume(state.seconds)
        last = trainer.budget.place(max(0, state.step - 1))
        trainer.masters.packing = trainer.schedule.packs(last)
        trainer.masters.load_state_dict(state.weights)
        trainer.optimiser.load_state_dict(state.optimiser)
        trainer.step, trainer.saved_at = state.step, self.checkpoints.path(state.step)
