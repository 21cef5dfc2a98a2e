"""Drafts a chain with EAGLE-3 over its own context cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.baselines.eagle3 import Eagle3
from domino_spec.decoding import DraftChoices, Proposal
from domino_spec.decoding import Sequence as Decoded
from domino_spec.drafter import DraftContext
from domino_spec.targets import Target


class Eagle3Proposer:
    """One token after the other, each from the last one and the drafter's own feature.

    A chain, not a tree: what is compared is the drafters, all verified alike.
    """

    def __init__(self, drafter: Eagle3, target: Target, *, depth: int) -> None:
        self.drafter = drafter
        self.target = target
        self.taps = drafter.taps
        self.depth = depth
        self._context = DraftContext(0)
        self._waiting: list[Tensor] = []

    def begin(self, rows: int) -> None:
        """Start with an empty context."""
        self._context = DraftContext(rows)
        self._waiting = [torch.empty(0)] * rows

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """Keep the verified states until the token behind each is known, [count, taps * hidden]."""
        assert taps is not None
        self._waiting = [
            taps[row, :count] if not len(kept) else torch.cat((kept, taps[row, :count]))
            for row, (kept, count) in enumerate(zip(self._waiting, counts, strict=True))
        ]

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:
        """Read what was verified since, then draft step by step."""
        drafter, target = self.drafter, self.target
        features = self._read(rows)
        slots = torch.arange(self._context.size, device=drafter.device)
        ends = torch.tensor(self._context.lengths, device=drafter.device).unsqueeze(1) - 1
        anchors = torch.tensor([[row.anchor] for row in rows], device=drafter.device)
        choices = DraftChoices(rows)
        drafts: list[Tensor] = []

        def choose(step: int, hidden: Tensor) -> Tensor:
            logits = drafter.logits(target, hidden[:, 0])
            drafts.append(choices.tokens(step, logits, drafter.draft_tokens))
            return drafts[-1].unsqueeze(1)

        hidden = drafter.unroll(
            target,
            features=features,
            anchor_tokens=anchors,
            positions=ends,
            context=self._context.layers()[0],
            visible=(slots <= ends).unsqueeze(1),  # [rows, 1, context]
            steps=depth,
            next_tokens=choose,
        )
        choose(depth - 1, hidden[:, :, -1])  # the last guess, which nothing reads
        return Proposal(torch.stack(drafts, dim=1), choices.drawn)

    def select(self, rows: Sequence[int]) -> None:
        """Drop finished rows."""
        self._context.select(rows)
        self._waiting = [self._waiting[row] for row in rows]

    def _read(self, rows: Sequence[Decoded]) -> Tensor:
        """Append what waits to the context; the last feature of each row, [rows, 1, hidden]."""
        drafter = self.drafter
        counts = [len(waiting) for waiting in self._waiting]
        width = max(counts)
        taps = torch.nn.utils.rnn.pad_sequence(self._waiting, batch_first=True)
        following = torch.zeros(len(rows), width, dtype=torch.long)
        for index, (row, start) in enumerate(zip(rows, self._context.lengths, strict=True)):
            known = (row.prompt + row.output)[start + 1 : start + 1 + counts[index]]
            following[index, : counts[index]] = torch.tensor(known)
        starts = torch.tensor(self._context.lengths, device=drafter.device).unsqueeze(1)
        positions = starts + torch.arange(width, device=drafter.device)
        features = drafter.features(taps)
        pair = drafter.context(self.target, features, following.to(drafter.device), positions)
        self._context.append([pair], counts)
        self._waiting = [waiting[:0] for waiting in self._waiting]
        last = torch.tensor(counts, device=drafter.device) - 1
        return features[torch.arange(len(rows), device=drafter.device), last].unsqueeze(1)
