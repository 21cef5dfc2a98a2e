"""Where drafts come from: anything that can guess, given the states of verified tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from domino_spec.decoding.sampling import DraftDistribution, Sampler
from domino_spec.decoding.sequence import Sequence as Decoded
from domino_spec.drafter import DraftContext, Drafter
from domino_spec.drafter.rollout import rollout
from domino_spec.targets import Target


@dataclass(frozen=True)
class Proposal:
    """Drafts for every row, and what the rows that draw theirs drew them from."""

    tokens: Tensor  # [rows, depth]
    drawn_from: list[list[DraftDistribution] | None]

    @classmethod
    def empty(cls, rows: int) -> Proposal:
        """Nothing to verify: the cycle is a step of plain decoding."""
        return cls(torch.zeros(rows, 0, dtype=torch.long), [None] * rows)


class Proposer(Protocol):
    """A source of drafts. Decoding is exact whatever it proposes."""

    @property
    def taps(self) -> Sequence[int]:
        """Target layers whose outputs it wants to observe."""

    @property
    def depth(self) -> int:
        """Drafts a cycle; 0 is plain decoding."""

    def begin(self, rows: int) -> None:
        """A new run starts with this many rows."""

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """The first `counts[row]` of these states [rows, n, taps * hidden] are verified."""

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:
        """Draft `depth` tokens behind each row's anchor."""

    def select(self, rows: Sequence[int]) -> None:
        """Only these rows go on, in this order."""


class DraftChoices:
    """Chooses drafts as their rows want them: greedily, drawn, or with the target's own noise."""

    def __init__(self, rows: Sequence[Decoded]) -> None:
        self._rows = rows
        self.drawn: list[list[DraftDistribution] | None] = [
            [] if _sampler(row).draws_drafts else None for row in rows
        ]

    def __call__(self, index: int, logits: Tensor, tokens: Tensor | None) -> Tensor:
        """Columns [rows] of a draft's logits [rows, k], behind which stand these target ids."""
        columns = logits.argmax(dim=-1)
        for row, kept in enumerate(self.drawn):
            sampler = _sampler(self._rows[row])
            ids = None if tokens is None else tokens[row]
            if kept is not None:
                columns[row], distribution = sampler.draft(logits[row], ids)
                kept.append(distribution)
            elif sampler.couples:
                position = sampler.ids(self._rows[row]).shape[1] + index
                columns[row] = sampler.coupled_draft(logits[row], ids, position)
        return columns

    def tokens(self, index: int, logits: Tensor, draft_tokens: Tensor | None) -> Tensor:
        """The same as target ids [rows], where all rows share a (reduced) vocabulary."""
        if draft_tokens is None:
            return self(index, logits, None)
        ids = draft_tokens.expand(logits.shape[0], -1)
        return draft_tokens[self(index, logits, ids)]


def _sampler(sequence: Decoded) -> Sampler:
    assert sequence.sampler is not None
    return sequence.sampler


class NoDrafts:
    """Plain decoding: the same loop with nothing to verify."""

    taps: Sequence[int] = ()
    depth = 0

    def begin(self, rows: int) -> None:
        """Nothing to prepare."""

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """Nothing to remember."""

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:  # noqa: ARG002
        """An empty proposal."""
        return Proposal.empty(len(rows))

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to drop."""


class DominoProposer:
    """Drafts with a Domino or DFlash drafter over its own context cache."""

    def __init__(
        self, drafter: Drafter, target: Target, *, depth: int, candidates: int | None = None
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.taps = drafter.config.target_layer_ids
        self.depth = depth
        self.candidates = candidates
        self._context = DraftContext(0)

    def begin(self, rows: int) -> None:
        """Start with an empty context."""
        self._context = DraftContext(rows)

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """Append the context keys and values of verified tokens."""
        assert taps is not None
        device = self.drafter.device
        starts = torch.tensor(self._context.lengths, device=device).unsqueeze(1)
        width = max(counts)
        positions = starts + torch.arange(width, device=device)
        self._context.append(self.drafter.context(taps[:, :width], positions), counts)

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:
        """One backbone forward, then the head's rollout."""
        anchors = torch.tensor([row.anchor for row in rows], device=self.drafter.device)
        hidden = self.drafter.decode_hidden(self.target, anchors, self._context, depth)
        choices = DraftChoices(rows)
        tokens = rollout(
            self.drafter,
            self.target,
            hidden=hidden,
            anchor_tokens=anchors,
            choose=choices,
            candidates=self.candidates,
        )
        return Proposal(tokens, choices.drawn)

    def select(self, rows: Sequence[int]) -> None:
        """Drop finished rows from the context."""
        self._context.select(rows)
