"""Prompt lookup: what followed the last few tokens when they stood in the text before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.decoding import Proposal
from domino_spec.decoding import Sequence as Decoded
from domino_spec.errors import InputError

LONGEST_MATCH = 3
DEFAULT_DEPTH = 10


class PromptLookup:
    """Proposes the continuation of the longest match, of the latest where it stands several times.

    Nothing is drawn: a draft that is certain is accepted as often by drawing the target's own
    token and comparing as by rejection, and both are exact. Where rows share a batch and one
    finds less than another, its drafts are filled up with its last token.
    """

    taps: Sequence[int] = ()

    def __init__(self, *, depth: int = DEFAULT_DEPTH, longest: int = LONGEST_MATCH) -> None:
        if depth < 1 or longest < 1:
            raise InputError(
                f"prompt lookup of {depth} drafts and matches of {longest}; expected 1 or more."
            )
        self.depth = depth
        self.longest = longest
        self._texts: dict[int, _Text] = {}

    def begin(self, rows: int) -> None:  # noqa: ARG002
        """Forget the last run's texts."""
        self._texts = {}

    def observe(self, taps: Tensor | None, counts: Sequence[int]) -> None:
        """The tokens themselves are enough."""

    def propose(self, rows: Sequence[Decoded], depth: int) -> Proposal:
        """Up to `depth` tokens a row; as many columns as the longest find has."""
        found = []
        for row in rows:
            text = self._texts.setdefault(row.index, _Text(self.longest))
            text.grow(row.prompt, row.output)
            found.append(text.continuation(depth))
        width = max(map(len, found))
        filled = [
            [*drafts, *[row.anchor] * (width - len(drafts))]
            for row, drafts in zip(rows, found, strict=True)
        ]
        return Proposal(torch.tensor(filled, dtype=torch.long), [None] * len(rows))

    def select(self, rows: Sequence[int]) -> None:
        """Rows are known by their own numbers."""


class _Text:
    """A row's tokens, and where each short sequence of them ended last."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def grow(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Take in what is new; the newest token has no continuation yet."""
        before = len(self._tokens)
        self._tokens += [*prompt, *generated] if not before else generated[before - len(prompt) :]
        for end in range(max(before, 1), len(self._tokens)):
            for length in range(1, min(self._longest, end) + 1):
                self._after[tuple(self._tokens[end - length : end])] = end

    def continuation(self, depth: int) -> list[int]:
        """What followed the longest known end of the text."""
        size = len(self._tokens)
        for length in range(min(self._longest, size), 0, -1):
            start = self._after.get(tuple(self._tokens[size - length :]))
            if start is not None:
                return self._tokens[start : start + depth]
        return []
