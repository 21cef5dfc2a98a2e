"""Baseline drafters as what an engine is given to draft with."""

from __future__ import annotations

import torch

from domino_spec.baselines.eagle3 import Eagle3
from domino_spec.baselines.files import AnyBaseline
from domino_spec.baselines.lean_eagle3 import LeanEagle3
from domino_spec.baselines.lean_medusa import LeanMedusa
from domino_spec.baselines.medusa import Medusa
from domino_spec.engine.draft import why_not_heads
from domino_spec.engine.models.base import InferenceModel
from domino_spec.engine.sources import Source


class BaselineSource:
    """A drafter, to be run over a lean target."""

    reach = 0

    def __init__(self, drafter: AnyBaseline) -> None:
        self.drafter = drafter
        self.default_depth = drafter.config.default_depth
        self.most_drafts = drafter.config.most_drafts

    def why_not(self, device: torch.device) -> str | None:
        """Heads that the kernels do not take, where it has any."""
        if isinstance(self.drafter, Eagle3):
            return why_not_heads(self.drafter.config.head_dim, device)
        return None

    def lean(self, target: InferenceModel, *, slots: int, capacity: int, pack: bool) -> Source:
        """The source itself."""
        if isinstance(self.drafter, Medusa):
            return LeanMedusa(self.drafter, target, slots=slots, capacity=capacity, pack=pack)
        assert isinstance(self.drafter, Eagle3)
        return LeanEagle3(self.drafter, target, slots=slots, capacity=capacity, pack=pack)
