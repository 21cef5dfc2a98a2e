"""Forward and backward over the blocks of a step, on a GPU as one CUDA graph.

A small target's step is thousands of kernels of a few microseconds each, which the host launches
more slowly than the GPU runs them. A graph is launched at once.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from domino_spec.engine.kernels.runtime import on_device
from domino_spec.errors import Notice
from domino_spec.targets import Target, read
from domino_spec.training.blocks import Blocks
from domino_spec.training.loss import Mixture
from domino_spec.training.objective import Objective, StepTerms
from domino_spec.training.optimiser import Masters

_EAGER_STEPS = 2
"""Steps that compile everything, before a graph is captured."""


_EXPECTED = (
    "RNN module weights are not part of single contiguous chunk",  # a GRU in bfloat16
    "Attempting to run cuBLAS, but there was no current CUDA context",  # the first backward pass
    "Synchronization debug mode is a prototype feature",  # how a capture is tried
)
"""Warnings of PyTorch's that a user can do nothing about."""


class CaptureNotice(Notice):
    """A step is launched kernel by kernel."""


class Learning:
    """Adds the gradients of a batch of blocks to the masters'."""

    def __init__(
        self,
        target: Target,
        objective: Objective[Any],
        masters: Masters,
        *,
        device: torch.device,
        recorder: Any = None,
    ) -> None:
        """A `recorder` of graphs is for steps of one batch: a replay replaces the gradients."""
        self.target, self._objective, self._masters = target, objective, masters
        self._device = device
        self.recorder = recorder
        """None: kernels are launched one by one."""
        self._captured: _CapturedLearning | None = None
        self._steps = self._labels = 0
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message=message)

    def __call__(self, blocks: Blocks, mixture: Mixture, divisor: float) -> StepTerms:
        """The loss of these blocks by this total weight, and what was right."""
        with on_device(self._device):
            captured = self._graph(blocks, mixture)
            if captured is None:
                self._steps += 1
                return self._learn(blocks.to(self._device), mixture, divisor)
            captured.inputs.fill(blocks, mixture, divisor)
            captured.graph.replay()
        self._masters.gradients = captured.gradients
        return captured.terms

    def release(self) -> None:
        """Give up the graph, before an evaluation: it needs memory, and may move weights."""
        self._captured = None

    def _learn(self, blocks: Blocks, mixture: Mixture, divisor: Tensor | float) -> StepTerms:
        with record_function("step: target"):
            reading = read(
                self.target,
                blocks.tokens,
                capture_layers=self._objective.drafter.capture_layers,
                positions=blocks.positions,
                documents=blocks.documents if blocks.packed else None,
            )
        terms: StepTerms = self._objective(
            self.target, reading, blocks, mixture=mixture, total_weight=divisor
        )
        with record_function("step: backward"):
            terms.loss.backward()  # type: ignore[no-untyped-call]
            self._masters.take_gradients()
        return terms._replace(loss=terms.loss.detach())

    def _graph(self, blocks: Blocks, mixture: Mixture) -> _CapturedLearning | None:
        """A graph that these blocks fit, captured once all is compiled; None: without one."""
        self._labels = max(self._labels, len(blocks.labels))
        if self.recorder is None or self._steps < _EAGER_STEPS:
            return None
        if self._captured is not None and not self._captured.inputs.fit(blocks, mixture):
            self.release()
        if self._captured is None:
            room = self._labels + self._objective.chunk
            self._capture(_Inputs.like(blocks, mixture, self._device, labels=room))
        return self._captured

    def _capture(self, inputs: _Inputs) -> None:
        def work() -> tuple[StepTerms, list[Tensor | None]]:
            self._masters.clear()
            self.target.forget_lm_head_rows()  # to gather them is part of the graph
            terms = self._learn(inputs.blocks, inputs.mixture, inputs.divisor)
            return terms, self._masters.gradients

        try:
            recorded = (
                self.recorder.record(work, large=True) if self.recorder.can_record(work) else None
            )
        except RuntimeError as error:  # what a target does, or memory for both ways at once
            warnings.warn(CaptureNotice(f"steps are not captured: {error}"), stacklevel=2)
            recorded = None
        if recorded is None:
            self.recorder = None  # launch by launch, then
            self._masters.clear()
            self.target.forget_lm_head_rows()
            return
        graph, (terms, gradients) = recorded
        self._captured = _CapturedLearning(graph, inputs, terms, gradients)


@dataclass(frozen=True)
class _Inputs:
    """What a graph reads: tensors that stay in place."""

    blocks: Blocks
    mixture: Mixture
    divisor: Tensor

    @classmethod
    def like(
        cls, blocks: Blocks, mixture: Mixture, device: torch.device, *, labels: int
    ) -> _Inputs:
        """With room for so many labels; any number of documents, one included, is packed."""

        def room(values: Tensor) -> Tensor:
            return values.new_zeros(labels, device=device)

        listed: dict[str, Any] = {name: room(getattr(blocks, name)) for name in _BY_LABEL}
        own = replace(blocks.to(device), **listed, packed=True)
        values = Mixture(
            base=torch.zeros_like(mixture.base),
            variation=None if mixture.variation is None else torch.zeros_like(mixture.variation),
        )
        inputs = cls(own, values, torch.ones((), device=device))
        inputs.fill(blocks, mixture, max(blocks.total_weight, 1e-9))
        return inputs

    def fit(self, blocks: Blocks, mixture: Mixture) -> bool:
        """Whether there is room for the labels, and the loss has the same terms."""
        same = (self.mixture.variation is None) == (mixture.variation is None)
        return same and len(blocks.labels) <= len(self.blocks.labels)

    def fill(self, blocks: Blocks, mixture: Mixture, divisor: float) -> None:
        """Take a step's values; labels that are left over weigh nothing."""
        for name in (*_BY_SEQUENCE, *_BY_LABEL):
            _fill(getattr(self.blocks, name), getattr(blocks, name))
        if blocks.vocabulary is not None:
            assert self.blocks.vocabulary is not None
            for mine, values in zip(self.blocks.vocabulary, blocks.vocabulary, strict=True):
                _fill(mine, values)
        self.mixture.base.copy_(mixture.base)
        if mixture.variation is not None:
            assert self.mixture.variation is not None
            self.mixture.variation.copy_(mixture.variation)
        self.divisor.fill_(divisor)


_BY_SEQUENCE = ("tokens", "positions", "documents", "anchors")
_BY_LABEL = ("slots", "sources", "labels", "drafts", "weights")


def _fill(mine: Tensor, values: Tensor) -> None:
    count = len(values)
    mine[:count].copy_(values, non_blocking=True)
    if count < len(mine):
        mine[count:].zero_()


@dataclass(frozen=True)
class _CapturedLearning:
    """A graph with the tensors it reads and writes."""

    graph: Any
    inputs: _Inputs
    terms: StepTerms
    gradients: list[Tensor | None]
