"""One sequence being decoded: its tokens, how it chooses and when it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.decoding.sampling import Choice, DraftDistribution, Sampler
from domino_spec.decoding.scores import TokenScore
from domino_spec.decoding.stats import RowStats

StopRule = Callable[["Row"], str | None]
"""Looks at a row after each token; the reason to stop, or None."""


@dataclass(frozen=True)
class Commit:
    """What one row committed in one cycle. `accepted` leading tokens were drafts."""

    row: int
    tokens: tuple[int, ...]
    accepted: int
    cycle: int
    """0 is the prefill, whose one token no draft competed for."""
    finish_reason: str | None
    scores: tuple[TokenScore, ...] | None = None
    """One a token, where the row's parameters ask for them."""


class Row:
    """A sequence with its own sampler, stop rules and statistics."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        stop_rules: Sequence[StopRule],
        max_new_tokens: int,
        device: torch.device,
        seen_prompt: Sequence[int] | None = None,
        keep_scores: bool = False,
    ) -> None:
        self.index = index
        self.prompt = list(prompt)
        self.sampler = sampler
        self.stop_rules = list(stop_rules)
        self.max_new_tokens = max_new_tokens
        self.generated: list[int] = []
        self.finish_reason: str | None = None
        self.stats = RowStats()
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_scores else None
        # What processors and criteria see: the prompt (as the caller padded it) and the answer.
        self._seen = list(self.prompt if seen_prompt is None else seen_prompt)
        sampler.begin(len(self._seen))
        self._device = device
        self._ids: Tensor | None = None
        self._filled = 0

    @property
    def ids(self) -> Tensor:
        """Everything committed so far, [1, length]; only what is new goes to the device."""
        length = len(self._seen)
        if self._ids is None:  # made at the first need: where the engine chooses there is none
            room = length + self.remaining
            self._ids = torch.zeros(1, room, dtype=torch.long, device=self._device)
        if self._filled < length:
            self._ids[0, self._filled : length] = torch.tensor(self._seen[self._filled :])
            self._filled = length
        return self._ids[:, :length]

    @property
    def anchor(self) -> int:
        """The last committed token, whose target states do not exist yet."""
        return self.generated[-1]

    @property
    def last_position(self) -> int:
        """Where the last token this row may generate would stand."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def remaining(self) -> int:
        """How many tokens may still be generated."""
        return self.max_new_tokens - len(self.generated)

    @property
    def plain(self) -> bool:
        """Whether an argmax of the raw logits is all this row needs."""
        return self.sampler.plain and self.scores is None

    def commit_block(
        self,
        logits: Tensor,  # [len(drafts) + 1, vocabulary]
        drafts: Sequence[int],
        drawn_from: Sequence[DraftDistribution] | None = None,
        argmax: Sequence[int] | None = None,
    ) -> int:
        """Walk the verified block as plain decoding would; how many drafts were accepted.

        Each position is processed once, in order, seeing only committed tokens, and the walk
        ends at the first token that is not the draft or that stops the row.
        """
        accepted = 0
        for position in range(len(drafts) + 1):
            draft = drafts[position] if position < len(drafts) else None
            if argmax is not None:
                choice = Choice(argmax[position], argmax[position] == draft)
            else:
                q = drawn_from[position] if drawn_from and draft is not None else None
                choice, scores = self.sampler.choose(self.ids, logits[position], draft, q)
                self._keep(scores, logits[position])
            self._append(choice.token)
            accepted += choice.accepted
            if self.finish_reason or not choice.accepted:
                break
        return accepted

    def take(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Commit tokens that were chosen elsewhere, up to the one that ends the row."""
        before = len(self.generated)
        for token in tokens:
            if self.finish_reason:
                break
            self._append(token)
        return tuple(self.generated[before:])

    def _append(self, token: int) -> None:
        self._seen.append(token)
        self.generated.append(token)
        for rule in self.stop_rules:
            self.finish_reason = self.finish_reason or rule(self)

    def _keep(self, scores: Tensor, logits: Tensor) -> None:
        if self.scores is not None and self.logits is not None:
            self.scores.append(scores.clone())
            self.logits.append(logits.float().clone())
