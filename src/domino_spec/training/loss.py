"""Cross-entropy over a vocabulary too large to hold for all labels at once.

Labels come in chunks. A chunk's logits live only while its loss and, in closed form, the loss's
gradients with respect to them are computed; what stays is a gradient per hidden state. So memory
does not grow with labels × vocabulary, and the backward pass has nothing left to recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_spec.drafter import TargetVocabulary

ChunkGradients = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How one step's loss is mixed; tensors, so that a new value compiles nothing anew."""

    base: Tensor  # λ
    variation: Tensor | None  # share of total variation in the final logits' loss, None if none

    @classmethod
    def of(cls, *, base: float, variation: float, device: torch.device) -> Mixture:
        """From the schedule's numbers."""
        values = torch.tensor([base, variation], dtype=torch.float32)
        if device.type == "cuda":
            values = values.pin_memory()
        values = values.to(device, non_blocking=True)
        return cls(base=values[0], variation=values[1] if variation else None)


def chunk_gradients(
    base: Tensor,  # [n, vocabulary]
    correction: Tensor | None,  # [n, vocabulary]: what the head adds
    teacher: Tensor | None,  # [n, vocabulary]: the target's logits, or None for hard labels
    best: Tensor,  # [n]: the column of the label, or of the target's own choice
    corrected: Tensor,  # [n] bool: labels after the head's pure prefix
    weights: Tensor,  # [n]: already divided by the step's total weight
    lam: Tensor,
    variation: Tensor | None,
    sharpness: float,
    offsets: Tensor | None = None,  # [vocabulary]: log of how many tokens a column stands for
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Loss and hits of each label, and the loss's gradients by base logits and correction.

    loss = w (λ CE(q, base) + (1 - λ) ((1 - v) CE(q, final) + v TV(q, final)))

    Written so that a compiler needs two passes over the logits: one for the normalisers, one
    for sums and gradients.
    """
    dtype = base.dtype
    base = base.float()
    column = best.unsqueeze(1)
    if teacher is None:
        truth = (torch.arange(base.shape[1], device=base.device) == column).float()
    else:
        truth = torch.softmax(_offset(teacher.float() * sharpness, offsets), dim=-1)
    log_base, loss_base, hit_base = _cross_entropy(base, truth, column, offsets)
    added = None if correction is None else correction.float() * corrected.unsqueeze(1)
    log_final, loss_final, hit_final = log_base, loss_base, hit_base
    if added is not None:
        log_final, loss_final, hit_final = _cross_entropy(base + added, truth, column, offsets)
    likely = log_final.exp()
    by_final = gap = likely - truth
    if variation is not None:
        sign = 0.5 * torch.sign(gap)
        distance = (sign * gap).sum(-1)  # total variation: half the summed absolute difference
        pull = likely * (sign - (likely * sign).sum(-1, keepdim=True))
        loss_final = (1 - variation) * loss_final + variation * distance
        by_final = (1 - variation) * gap + variation * pull

    weight = weights.unsqueeze(1)
    loss = lam * loss_base + (1 - lam) * loss_final
    by_final = weight * (1 - lam) * by_final
    by_base = weight * lam * (log_base.exp() - truth) + by_final
    by_added = None
    if correction is not None:  # the drafter's type, which need not be the target's
        by_added = (by_final * corrected.unsqueeze(1)).to(correction.dtype)
    return weights * loss, hit_base, hit_final, by_base.to(dtype), by_added


def _offset(logits: Tensor, offsets: Tensor | None) -> Tensor:
    return logits if offsets is None else logits + offsets


def _cross_entropy(
    logits: Tensor, truth: Tensor, column: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, the loss, and whether the column is a largest one."""
    log = torch.log_softmax(_offset(logits, offsets), dim=-1)
    hit = logits.gather(1, column).squeeze(1) >= logits.amax(-1)
    return log, -(truth * log).sum(-1), hit


class ChunkedLoss(torch.autograd.Function):
    """The weighted loss, and by label whether base and final logits name the right token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [labels, hidden]
        activation: Tensor | None,  # [labels, rank]
        output_weight: Tensor | None,  # [vocabulary, rank]
        job: LossJob,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient_hidden = torch.empty_like(hidden)
        gradient_activation = None if activation is None else torch.empty_like(activation)
        # The output weight's gradient is a sum over chunks: it is kept in full precision.
        gradient_weight = None
        if output_weight is not None:
            gradient_weight = torch.zeros_like(output_weight, dtype=torch.float32)
        losses, base_hits, final_hits = [], [], []
        for start in range(0, hidden.shape[0], job.chunk):
            part = slice(start, start + job.chunk)
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                base = job.target.logits(leaf, job.tokens)
            correction = None
            if activation is not None and output_weight is not None:
                correction = activation[part] @ output_weight.T
            teacher = job.teacher_logits(part)
            loss, hit_base, hit_final, by_base, by_added = job.gradients(
                base.detach(),
                correction,
                teacher,
                job.labels[part] if teacher is None else teacher.argmax(dim=-1),
                job.corrected[part],
                job.weights[part],
                job.mixture.base,
                job.mixture.variation,
                job.sharpness,
                job.offsets,
            )
            (gradient_hidden[part],) = torch.autograd.grad(base, leaf, by_base)
            if by_added is not None:
                assert activation is not None
                assert output_weight is not None
                assert gradient_activation is not None
                assert gradient_weight is not None
                gradient_activation[part] = by_added @ output_weight
                gradient_weight += by_added.T @ activation[part]
            losses.append(loss)
            base_hits.append(hit_base)
            final_hits.append(hit_final)
        ctx.save_for_backward(gradient_hidden, gradient_activation, gradient_weight)
        ctx.weight_dtype = None if output_weight is None else output_weight.dtype
        hits = torch.cat(base_hits), torch.cat(final_hits)
        ctx.mark_non_differentiable(*hits)
        return torch.cat(losses).sum(), *hits

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Any) -> Any:
        hidden, activation, weight = ctx.saved_tensors
        scaled = [None if g is None else g * scale.to(g.dtype) for g in (hidden, activation)]
        by_weight = None if weight is None else (weight * scale).to(ctx.weight_dtype)
        return *scaled, by_weight, None


@dataclass(frozen=True, kw_only=True)
class LossJob:
    """What the chunks need besides the tensors that are trained."""

    target: TargetVocabulary
    teacher: Tensor | None  # [labels, hidden]: the target's states before each label; None = hard
    tokens: Tensor | None  # of the softmax; None: all
    offsets: Tensor | None  # [tokens]: log of how many a token stands for
    labels: Tensor  # [labels]: columns among the tokens
    corrected: Tensor  # [labels] bool
    weights: Tensor  # [labels]
    mixture: Mixture
    sharpness: float
    chunk: int
    gradients: ChunkGradients

    def teacher_logits(self, part: slice) -> Tensor | None:
        """The target's own logits for a chunk."""
        if self.teacher is None:
            return None
        with torch.no_grad():
            return self.target.logits(self.teacher[part], self.tokens)
