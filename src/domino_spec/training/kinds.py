"""The objectives of the baseline drafters, and which objective a drafter has."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from domino_spec.baselines import Eagle3, Medusa
from domino_spec.baselines.every import AnyDrafter
from domino_spec.drafter import Drafter, TargetVocabulary
from domino_spec.targets import Reading
from domino_spec.training.blocks import Blocks
from domino_spec.training.objective import BlockObjective, Learnt, Objective, sequences


class MedusaObjective(Objective[Medusa]):
    """All heads on the state before each anchor."""

    history = 1

    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:  # noqa: ARG002
        """Head k at anchor a: the state of token a - 1, the label token a + k."""
        with record_function("step: backbone"):
            before = (blocks.anchors - 1).clamp(min=0).unsqueeze(2)
            states = reading.taps.gather(1, before.expand(-1, -1, reading.taps.shape[2]))
            hidden = self.drafter(states)  # [rows, anchors, heads, hidden]
            return Learnt(hidden.flatten(0, 2).index_select(0, blocks.slots))


class Eagle3Objective(Objective[Eagle3]):
    """Training-time test: a chain behind each anchor, fed with its own states."""

    history = 1

    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:
        """All chains at once, over the true tokens."""
        with record_function("step: backbone"):
            # [rows, anchors, steps, hidden]
            hidden = self.drafter(target, **sequences(reading, blocks))
            return Learnt(hidden.flatten(0, 2).index_select(0, blocks.slots))


def make_objective(drafter: AnyDrafter, **options: Any) -> Objective[Any]:
    """The objective of a drafter's kind."""
    if isinstance(drafter, Drafter):
        return BlockObjective(drafter, **options)
    if isinstance(drafter, Medusa):
        return MedusaObjective(drafter, **options)
    assert isinstance(drafter, Eagle3)
    return Eagle3Objective(drafter, **options)
