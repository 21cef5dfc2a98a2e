"""Verify length by sequence: a batch verifies the drafts that are most likely to be accepted.

How many drafts a batch verifies is decided before it drafts (`policy`, from cycles gone by). Which
ones, it decides on the device: each draft has a chance of acceptance, given those before it; a
sequence's chances multiplied up to a draft say how likely that one is reached and accepted; and the
best of the whole batch are verified. These products fall along a sequence, so that what it verifies
is always the beginning of its draft.

Chances come from draft logits: the logistic function of how far the best token is ahead of the
second, with a bias and a slope for each place in the block. They are learnt while the engine runs,
from the drafts that were verified and reached.

**Why that is lossless.** Under the coupled rule and `match` a position's token is the same whatever
is verified. Under rejection and block verification let M(x) be the distribution of what a sequence
commits if the drafts x are verified. If x' is drawn from the drafter's distribution after x, the
mean of M(x, x') is M(x): one more draft changes nothing on average, whatever came before. Choosing
the best products of a batch is the same as to begin with no drafts and to add, one at a time, the
one with the best product among the next drafts of all sequences. Which one that is depends on the
drafts added before it, from which its logits follow, and not on itself. So the mean of the product
of all sequences' M stays what it was without drafts: each sequence's tokens have the target's
distribution, independent of the others'. A chance that looked at the drawn token would break this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.engine.attention import AttentionMetadata, Packed
from domino_spec.engine.kernels.lengths import Lengths, learn, verify_lengths
from domino_spec.engine.kernels.topk import top_candidates
from domino_spec.engine.sampling import DraftLogits

_MOST_MARGIN = 16.0
_PRIOR = (-0.5, 0.7)
"""Bias and slope before anything was seen."""
_KNOWN = (2.0, 0.0, 8.0)
"""How firmly, as the sums of `AcceptanceModel.information`."""


class AcceptanceModel:
    """The chance of each draft, given that those before it were accepted.

    Sequences that sample have chances of their own. Tensors stay where they are: captured cycles
    read and write them.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.weights = torch.tensor(_PRIOR, device=device).repeat(2, depth, 1)
        """Bias and slope, [greedy or sampled, depth, 2]."""
        self.prior = torch.tensor(_KNOWN, device=device)
        self.information = self.prior.repeat(2, depth, 1)
        """Sums over observations: of 1, the margin and its square, a quarter of each."""

    def choose(
        self,
        drawn_from: list[DraftLogits],
        *,
        sampled: Tensor,  # [sequences] bool
        live: Tensor,  # [sequences] bool: not those that fill up the batch
        budget: int,
    ) -> Lengths:
        """How many of its drafts, whose logits these are, each sequence verifies.

        `budget` is their number a sequence, on average over the batch.
        """
        return verify_lengths(margins(drawn_from), self.weights, sampled, live, budget)

    def learn(self, lengths: Lengths, accepted: Tensor) -> None:
        """So many drafts of each sequence were accepted."""
        learn(lengths, accepted, self.weights, self.information, self.prior)


def margins(drawn_from: list[DraftLogits]) -> Tensor:
    """How far the best logit of each draft is ahead of the second, [sequences, depth] float32."""
    found = []
    for each in drawn_from:
        best, _ = top_candidates(each.logits.flatten(0, 1), min(2, each.logits.shape[2]))
        margin = (best[:, 0].float() - best[:, -1].float()).clamp(max=_MOST_MARGIN)
        found.append(torch.nan_to_num(margin).view(each.logits.shape[:2]))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


@dataclass(frozen=True)
class PackedBlocks:
    """Blocks of different lengths as one row of tokens, and back."""

    lengths: Lengths
    width: int
    """Tokens of the longest block there may be."""

    def pack(self, block: Tensor) -> Tensor:
        """The verified tokens [tokens, 1] of whole blocks [sequences, width]."""
        return block[self.lengths.rows, self.lengths.steps].unsqueeze(1)

    def unpack(self, values: Tensor) -> Tensor:
        """Values [tokens, 1, ...] of verified tokens as [sequences, width, ...].

        Places that were not verified have the values of the last one that was.
        """
        lengths = self.lengths.lengths.unsqueeze(1)
        steps = torch.arange(self.width, device=values.device).minimum(lengths)
        return values[self.lengths.offsets[:-1].unsqueeze(1) + steps, 0]

    def metadata(self, slots: Tensor, starts: Tensor) -> AttentionMetadata:
        """Each token is a sequence of one, whose attention is that of its block."""
        rows, steps = self.lengths.rows, self.lengths.steps
        packed = Packed(slots, starts, self.lengths.offsets, rows, steps, self.width)
        return AttentionMetadata(slots[rows], starts[rows] + steps, 1, packed=packed)
