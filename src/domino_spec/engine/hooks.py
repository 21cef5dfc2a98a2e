"""Sequences with logits processors or hooks: the host commits their verified blocks in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.processors import apply_hook, next_banned, no_token_left
from domino_spec.engine.sampling import Draws


class HookedWalk:
    """Walks verified blocks position by position, all sequences at once, as the reference loop.

    A position is processed once it is known to follow committed tokens: a hook never sees a
    rejected draft, nor a position after the sequence's end. What a sequence's own processors, hooks
    or stop rules raise is its `error`, and the others go on.
    """

    def __init__(self, sequences: Sequence[Decoded]) -> None:
        self._sequences = sequences
        self.taken: list[list[int]] = [[] for _ in sequences]
        """What each sequence committed."""

    def choose(
        self,
        logits: Tensor,  # [sequences, n, vocabulary] float32, written to
        drafts: Sequence[Sequence[int]],  # [sequences][n - 1]
        draws: Draws,
        starts: Tensor,  # [sequences]
    ) -> Tensor:
        """Commit tokens; what was chosen, [sequences, n], 0 where nothing was reached."""
        chosen = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
        live = list(range(len(self._sequences)))
        for place in range(logits.shape[1]):
            here = logits[:, place]  # [sequences, vocabulary]
            live = [index for index in live if self._process(index, here[index])]
            if not live:
                break
            chosen[:, place : place + 1] = draws.choose(here.unsqueeze(1), starts + place)
            column = chosen[:, place]
            left = here.gather(1, column.unsqueeze(1))[:, 0] > -torch.inf
            tokens, any_left = torch.stack((column, left.long())).tolist()  # waits once
            live = [
                index
                for index in live
                if self._commit(index, tokens[index], any_left=bool(any_left[index]))
                and drafts[index][place : place + 1] == [tokens[index]]
            ]
        return chosen

    def _process(self, index: int, logits: Tensor) -> bool:
        """Put a sequence's processed logits [vocabulary] in place; whether that worked."""
        sequence = self._sequences[index]
        params, found = sequence.params, logits
        try:
            if params.processors:
                chain = LogitsProcessorList(params.processors)
                found = chain(sequence.ids(logits.device), found.unsqueeze(0))[0]
            for hook in params.hooks:
                found = apply_hook(hook, sequence.prompt, sequence.output, found)
            if sequence.matcher is not None:
                banned = next_banned(sequence.matcher, len(logits), logits.device)
                found = found.masked_fill(banned, -torch.inf)
            logits.copy_(found)
        except Exception as error:
            sequence.error = error
        return sequence.error is None

    def _commit(self, index: int, token: int, *, any_left: bool) -> bool:
        """Commit a token, if there was one to choose; whether the sequence goes on."""
        sequence = self._sequences[index]
        try:
            if not any_left:
                raise no_token_left(len(sequence.prompt) + len(sequence.output))
            self.taken[index] += sequence.take([token])
        except Exception as error:
            sequence.error = error
        return not sequence.finished
