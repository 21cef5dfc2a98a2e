"""Writes a run down: checkpoints to go on from, and at the end the drafter itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from domino_spec.baselines.every import AnyDrafter, drafter_like, save_any
from domino_spec.checkpoints import Provenance
from domino_spec.training.masters import Masters
from domino_spec.training.optimiser import Optimiser
from domino_spec.training.state import Checkpoints, RunState
from domino_spec.training.trainer import Trainer
from domino_spec.training.world import World

DRAFTER_FOLDER = "drafter"


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Knows all that is saved. Every process calls it, since each may hold a part."""

    out: Path
    checkpoints: Checkpoints
    drafter: AnyDrafter
    masters: Masters
    optimiser: Optimiser
    world: World
    dtype: torch.dtype
    settings: dict[str, Any]
    provenance: Provenance

    def save(self, trainer: Trainer) -> Path | None:
        """A checkpoint of this step; None where another process writes it."""
        weights, optimiser = self.masters.state_dict(), self.optimiser.state_dict()
        if not self.world.leads:
            return None
        state = RunState(
            step=trainer.step,
            weights=weights,
            optimiser=optimiser,
            data=trainer.position,
            settings=self.settings,
            seconds=trainer.budget.seconds,
        )
        drafter = drafter_like(self.drafter, weights)
        return self.checkpoints.save(state, drafter, dtype=self.dtype, provenance=self.provenance)

    def finish(self, trainer: Trainer) -> Path | None:
        """The trained drafter in its own kind's layout, with what was last measured of it."""
        weights = self.masters.state_dict()
        if not self.world.leads:
            return None
        drafter = drafter_like(self.drafter, weights)
        folder = self.out / DRAFTER_FOLDER
        provenance = replace(self.provenance, tokens_per_cycle=trainer.tokens_per_cycle)
        return save_any(drafter, folder, provenance=provenance, dtype=self.dtype)

    def restore(self, state: RunState, trainer: Trainer) -> None:
        """Go on exactly where a checkpoint was written."""
        self.masters.load_state_dict(state.weights)
        self.optimiser.load_state_dict(state.optimiser)
        trainer.budget.resume(state.seconds)
        trainer.step, trainer.saved_at = state.step, self.checkpoints.path(state.step)
