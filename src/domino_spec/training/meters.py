"""Running sums of what a step tells, read off the device only when something is reported."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from domino_spec.training.blocks import Blocks
from domino_spec.training.objective import StepTerms
from domino_spec.training.world import World


class Meter:
    """Sums since the last report."""

    def __init__(self, depth: int, world: World) -> None:
        self._depth, self._world = depth, world
        self._reset()

    def add(self, terms: StepTerms, blocks: Blocks) -> None:
        """One forward's terms."""
        self._hits += torch.stack((terms.base_hits, terms.final_hits, terms.counts))
        self._runs += terms.run_length
        self._forwards += 1
        self._conversations += blocks.conversations
        self._tokens += blocks.supervised_tokens
        self._labels += blocks.label_count

    def step(self, loss: Tensor, norm: Tensor) -> None:
        """One step's loss (this process's share of it) and gradient norm."""
        self._loss += loss
        self._norm += norm
        self._steps += 1

    @property
    def empty(self) -> bool:
        """Whether no step was made since the last report."""
        return self._steps == 0

    def pause(self, seconds: float) -> None:
        """Time that was not training."""
        self._paused += seconds

    def report(self) -> dict[str, Any]:
        """Means since the last report; waits for the device."""
        world = self._world
        sums = torch.cat((self._hits.flatten(), torch.stack((self._loss, self._runs)))).double()
        values = world.sum_tensors(sums).tolist()
        hits, (loss, runs) = values[:-2], values[-2:]
        depth = self._depth
        base, final, counts = hits[:depth], hits[depth : 2 * depth], hits[2 * depth :]
        seconds = time.perf_counter() - self._since - self._paused
        conversations = world.sum(self._conversations)
        told = {
            "loss": loss / max(1, self._steps) / world.size,
            "grad_norm": float(self._norm) / max(1, self._steps),
            "run_length": runs / max(1, self._forwards * world.size),
            "base_accuracy": [_ratio(b, c) for b, c in zip(base, counts, strict=True)],
            "accuracy": [_ratio(f, c) for f, c in zip(final, counts, strict=True)],
            "conversations_per_second": conversations / seconds,
            "answer_tokens_per_second": world.sum(self._tokens) / seconds,
            "labels_per_second": world.sum(self._labels) / seconds,
            "seconds_per_step": seconds / max(1, self._steps),
        }
        self._reset()
        return told

    def _reset(self) -> None:
        device = self._world.device
        self._hits = torch.zeros(3, self._depth, device=device)
        self._loss = torch.zeros((), device=device)
        self._norm = torch.zeros((), device=device)
        self._runs = torch.zeros((), device=device)
        self._steps = self._forwards = self._conversations = self._tokens = self._labels = 0
        self._paused = 0.0
        self._since = time.perf_counter()


def _ratio(part: float, total: float) -> float:
    return round(part / total, 4) if total else 0.0


class Watch:
    """Notices a loss or a gradient that is no number, and a loss that runs away."""

    def __init__(self, factor: float, *, patience: int = 3) -> None:
        self._factor, self._patience = factor, patience
        self._smooth: float | None = None
        self._best = float("inf")
        self._bad = 0

    def see(self, loss: float, norm: float = 0.0) -> str | None:
        """What is wrong, in words, or None."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):  # the weights are spoilt already, the next loss will show it
            return f"the gradient's norm is {norm}"
        self._smooth = loss if self._smooth is None else 0.7 * self._smooth + 0.3 * loss
        self._best = min(self._best, self._smooth)
        self._bad = self._bad + 1 if self._smooth > self._factor * self._best else 0
        if self._bad >= self._patience:
            return f"the loss rose to {self._smooth:.3g} from its best of {self._best:.3g}"
        return None
