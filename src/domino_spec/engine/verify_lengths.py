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
commits if the drafts x are verified. If x' is drawn from the drafter's distribution q after x, the
mean of M(x, x') is M(x): one more draft changes nothing on average, whatever came before. (With P
the joint ratio after x, 1 under token rejection if all of x was accepted, and p the target's
distribution there: v is accepted with min(P p(v), q(v)) and drawn instead with max(P p(v) - q(v),
0), together P p(v), as if v had been drawn from p with chance P; what ends earlier stays.) Choosing
the best products of a batch is the same as to begin with no drafts and to add, one at a time, the
one with the best product among the next drafts of all sequences. Which one that is depends on the
drafts added before it, from which its logits follow, and not on itself. So the mean of the product
of all sequences' M stays what it was without drafts: each sequence's tokens have the target's
distribution, independent of the others'. A chance that looked at the drawn token would break this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.engine.attention import AttentionMetadata, Ragged
from domino_spec.engine.kernels.lengths import (
    Lengths,
    Sequences,
    learn,
    margins,
    pad_tokens,
    padded_places,
    verify_lengths,
)
from domino_spec.engine.sampling import DraftLogits

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

    def choose(self, drawn_from: Sequence[DraftLogits], batch: Sequences, budget: int) -> Lengths:
        """How many of its drafts, whose logits these are, each sequence verifies.

        `budget` is their number a sequence, on average over the batch.
        """
        found = [margins(each.logits) for each in drawn_from]
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return verify_lengths(whole, self.weights, batch, budget)

    def learn(self, lengths: Lengths, accepted: Tensor) -> None:
        """So many drafts of each sequence were accepted."""
        learn(lengths, accepted, self.weights, self.information, self.prior)


@dataclass(frozen=True)
class RaggedBlocks:
    """Blocks of different lengths as one row of tokens, and back."""

    lengths: Lengths
    width: int
    """Tokens of the longest block there may be."""

    def pack(self, block: Tensor) -> Tensor:
        """The verified tokens [tokens, 1] of whole blocks [sequences, width]."""
        return block[self.lengths.rows, self.lengths.steps].unsqueeze(1)

    def pad(self, logits: Tensor) -> Tensor:
        """Logits [tokens, 1, vocabulary] of verified tokens as [sequences, width, vocabulary].

        Places that were not verified have those of the last one that was.
        """
        return logits[padded_places(self.lengths, self.width), 0]

    def pad_tokens(self, tokens: Tensor) -> Tensor:
        """The same of tokens [tokens, 1]."""
        return pad_tokens(tokens, self.lengths, self.width)

    @property
    def metadata(self) -> AttentionMetadata:
        """Each token is a sequence of one, whose attention is that of its block."""
        own, batch = self.lengths, self.lengths.batch
        ragged = Ragged(batch.slots, batch.starts, own.offsets, own.rows, own.steps, self.width)
        return AttentionMetadata(own.slots, own.places, 1, ragged=ragged)
