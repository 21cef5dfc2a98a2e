"""The training loss of a drafter over one batch of blocks.

What is learnt is the same for every kind: after each anchor the target's own distribution (or
the data's token), weighted by the draft's position. How a kind comes to its hidden states is its
own; `Objective.learn` is all that differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from domino_spec.drafter import DraftModel, DraftModule, Eagle3, Medusa, TargetVocabulary
from domino_spec.targets import Reading
from domino_spec.training.blocks import Blocks
from domino_spec.training.loss import ChunkedLoss, ChunkGradients, LossJob, Mixture, chunk_gradients

Labels = Literal["hard", "soft"]


class StepTerms(NamedTuple):
    """A step's loss and what was right, as tensors on the device."""

    loss: Tensor
    base_hits: Tensor  # [depth]: base logits that name the target's token
    final_hits: Tensor  # [depth]
    counts: Tensor  # [depth]
    run_length: Tensor  # mean drafts that are right in a row, teacher forced


class Learnt(NamedTuple):
    """What a drafter says of each label: logits are lm_head(hidden), perhaps corrected."""

    hidden: Tensor  # [labels, hidden]
    activation: Tensor | None = None  # [labels, rank]
    output_weight: Tensor | None = None  # [output vocabulary, rank]
    prefix_len: int = 0
    """Leading drafts that are not corrected."""


D = TypeVar("D", bound=DraftModule)


class Objective(nn.Module, ABC, Generic[D]):
    """Wraps a drafter so that its forward is its loss; what is sharded is sharded as a whole."""

    history = 0
    """Tokens of its own document that must stand before an anchor."""

    def __init__(
        self,
        drafter: D,
        *,
        labels: Labels,
        sharpness: float,
        chunk: int,
        gradients: ChunkGradients = chunk_gradients,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.labels: Labels = labels
        self.sharpness = sharpness
        self.chunk = chunk
        self._gradients = gradients
        columns = None
        if drafter.draft_tokens is not None:
            columns = torch.full((drafter.config.vocab_size,), -1, device=drafter.device)
            columns[drafter.draft_tokens] = torch.arange(
                len(drafter.draft_tokens), device=drafter.device
            )
        # Column of each target token in a reduced vocabulary, -1 where it has none.
        self.register_buffer("columns", columns, persistent=False)

    @abstractmethod
    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:
        """The drafter's forward over all blocks, teacher forced, at the labels."""

    @property
    def depth(self) -> int:
        """Drafts after each anchor."""
        return self.drafter.config.trained_depth

    @property
    def known(self) -> Tensor | None:
        """Tokens that may be hard labels, on the CPU; None means all."""
        if self.columns is None or self.labels == "soft":
            return None
        assert isinstance(self.columns, Tensor)
        return (self.columns >= 0).cpu()

    def forward(
        self,
        target: TargetVocabulary,
        reading: Reading,
        blocks: Blocks,
        *,
        mixture: Mixture,
        total_weight: Tensor | float,
    ) -> StepTerms:
        """The step's loss, and what was right."""
        learnt = self.learn(target, reading, blocks)
        with record_function("step: loss"):
            job = self._job(target, reading, blocks, learnt, mixture, total_weight)
            weight = learnt.output_weight
            if weight is not None and blocks.vocabulary is not None:
                weight = weight.index_select(0, blocks.vocabulary.tokens)
            loss, base_hits, final_hits = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
                learnt.hidden, learnt.activation, weight, job
            )
        return StepTerms(loss=loss, **_accuracy(base_hits, final_hits, blocks, self.depth))

    def _job(
        self,
        target: TargetVocabulary,
        reading: Reading,
        blocks: Blocks,
        learnt: Learnt,
        mixture: Mixture,
        total_weight: Tensor | float,
    ) -> LossJob:
        teacher = None
        if self.labels == "soft":
            teacher = reading.hidden.flatten(0, 1).index_select(0, blocks.sources)
        labels, tokens, offsets = blocks.labels, self.drafter.draft_tokens, None
        if self.columns is not None:
            assert isinstance(self.columns, Tensor)
            labels = self.columns[labels].clamp(min=0)
        if blocks.vocabulary is not None:
            tokens, offsets = blocks.vocabulary
            labels = torch.searchsorted(tokens, labels)
        return LossJob(
            target=target,
            teacher=teacher,
            tokens=tokens,
            offsets=offsets,
            labels=labels,
            corrected=blocks.drafts >= learnt.prefix_len,
            weights=blocks.weights / total_weight,
            mixture=mixture,
            sharpness=self.sharpness,
            chunk=self.chunk,
            gradients=self._gradients,
        )


def sequences(reading: Reading, blocks: Blocks) -> dict[str, Any]:
    """Whole sequences as a drafter's forward takes them."""
    return {
        "captured": reading.captured,
        "tokens": blocks.tokens,
        "anchors": blocks.anchors,
        "positions": blocks.positions,
        "documents": blocks.documents if blocks.packed else None,
    }


class BlockObjective(Objective[DraftModel]):
    """Block drafters: the backbone over all blocks, the head over the true prefixes."""

    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:
        """Base logits from the slots, the correction from the prefixes' states."""
        drafter = self.drafter
        with record_function("step: backbone"):
            # [batch, anchors, depth, hidden]
            hidden = drafter.block_hidden(target, **sequences(reading, blocks))
            kept = hidden.flatten(0, 2).index_select(0, blocks.slots)  # [labels, hidden]
        if drafter.head is None:
            return Learnt(kept)
        with record_function("step: head"):
            states = drafter.prefix_states(target, blocks.tokens, blocks.anchors)
            states = states.flatten(0, 2).index_select(0, blocks.slots)
            activation = drafter.head.activation(drafter.head.project_hidden(kept), states)
        return Learnt(kept, activation, drafter.head.output_weight, drafter.head.prefix_len)


@torch.no_grad()
def _accuracy(
    base_hits: Tensor, final_hits: Tensor, blocks: Blocks, depth: int
) -> dict[str, Tensor]:
    real = (blocks.weights > 0).float()
    by_draft = torch.zeros(3, depth, device=real.device)
    by_draft.index_add_(1, blocks.drafts, torch.stack((base_hits * real, final_hits * real, real)))
    slots = blocks.anchors.numel() * depth
    right = torch.zeros(slots, device=real.device).index_add_(0, blocks.slots, final_hits * real)
    first = torch.zeros(slots, device=real.device).index_add_(0, blocks.slots, real)
    runs = right.view(-1, depth).cumprod(dim=1).sum(dim=1).sum()
    return {
        "base_hits": by_draft[0],
        "final_hits": by_draft[1],
        "counts": by_draft[2],
        "run_length": runs / first.view(-1, depth)[:, 0].sum().clamp(min=1),
    }


class MedusaObjective(Objective[Medusa]):
    """All heads on the state before each anchor."""

    history = 1

    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:  # noqa: ARG002
        """Head k at anchor a: the state of token a - 1, the label token a + k."""
        with record_function("step: backbone"):
            before = (blocks.anchors - 1).clamp(min=0).unsqueeze(2)
            states = reading.captured.gather(1, before.expand(-1, -1, reading.captured.shape[2]))
            hidden = self.drafter(states)  # [batch, anchors, heads, hidden]
            return Learnt(hidden.flatten(0, 2).index_select(0, blocks.slots))


class Eagle3Objective(Objective[Eagle3]):
    """Training-time test: a chain after each anchor, fed with its own states."""

    history = 1

    def learn(self, target: TargetVocabulary, reading: Reading, blocks: Blocks) -> Learnt:
        """All chains at once, over the true tokens."""
        with record_function("step: backbone"):
            # [batch, anchors, steps, hidden]
            hidden = self.drafter(target, **sequences(reading, blocks))
            return Learnt(hidden.flatten(0, 2).index_select(0, blocks.slots))


def make_objective(drafter: DraftModule, **options: Any) -> Objective[Any]:
    """The objective of a drafter's kind."""
    if isinstance(drafter, DraftModel):
        return BlockObjective(drafter, **options)
    if isinstance(drafter, Medusa):
        return MedusaObjective(drafter, **options)
    assert isinstance(drafter, Eagle3)
    return Eagle3Objective(drafter, **options)
