"""Scores of a verified block as columns of its report, so that the host waits once for both."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from domino_spec.decoding import TokenScore
from domino_spec.decoding.params import MOST_LOGPROBS

AT_ONCE = 64
"""Places whose logits are widened to float32 at a time."""


def score_columns(logits: Tensor, chosen: Tensor, *, ranked: bool) -> Tensor:
    """Numbers [batch, n * width] in a report's own type, from raw logits [batch, n, vocabulary].

    For each of the chosen tokens [batch, n] its log-probability and, if `ranked`, those of the
    likeliest tokens, then their ids. Log-probabilities are kept bit by bit, as float64.
    """
    most = min(MOST_LOGPROBS, logits.shape[-1]) if ranked else 0
    places = zip(
        torch.split(logits.flatten(0, 1), AT_ONCE),
        torch.split(chosen.flatten(), AT_ONCE),
        strict=True,
    )
    found = []
    for part, tokens in places:
        wide = part.float()
        whole = wide.logsumexp(dim=-1, keepdim=True)
        numbers = wide.gather(1, tokens.unsqueeze(1))
        ids = tokens.new_empty(len(tokens), 0)
        if most:
            best, ids = wide.topk(most, dim=-1)
            numbers = torch.cat((numbers, best), dim=1)
        bits = (numbers - whole).double().view(torch.int64)
        found.append(torch.cat((bits, ids), dim=1))  # [places, width]
    return torch.cat(found).view(len(chosen), -1)


def prompt_columns(logits: Tensor, following: Tensor) -> Tensor:
    """A row a token of a prompt, [n, 1 + width]: its rank and its `score_columns`.

    From raw logits [n, vocabulary] of the tokens before, and the tokens themselves, [n].
    """
    columns = score_columns(logits.unsqueeze(1), following.unsqueeze(1), ranked=True)
    own = logits.gather(1, following.unsqueeze(1))
    ranks = (logits > own).sum(dim=1, keepdim=True) + 1
    return torch.cat((ranks, columns), dim=1)


def read_prompt_scores(columns: Tensor, top: int) -> list[TokenScore]:
    """The same read back on the host."""
    scores = ScoreTable(columns[:, 1:].reshape(1, -1), len(columns))
    told = scores.of(0, tokens=len(columns), top=top)
    ranks = columns[:, 0].tolist()
    return [replace(score, rank=rank) for score, rank in zip(told, ranks, strict=True)]


class ScoreTable:
    """The same read back on the host."""

    def __init__(self, columns: Tensor, places: int) -> None:
        """`columns` [batch, places * width]."""
        cells = columns.reshape(len(columns), places, -1)  # [batch, places, width]
        self._most = cells.shape[-1] // 2
        self._numbers = cells[..., : self._most + 1].contiguous().view(torch.float64)
        self._ids = cells[..., self._most + 1 :]

    def of(self, index: int, *, tokens: int, top: int) -> tuple[TokenScore, ...]:
        """Scores of a sequence's first tokens, with so many of the likeliest ones each."""
        numbers = self._numbers[index, :tokens, : top + 1].tolist()
        ids = self._ids[index, :tokens, :top].tolist()
        return tuple(
            TokenScore(own, tuple(zip(best, scores, strict=True)))
            for (own, *scores), best in zip(numbers, ids, strict=True)
        )
