"""How likely the target itself found a committed token: its raw log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenScore:
    """Before temperature, penalties and cut-offs."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the best first, as many as were asked for; with log-probabilities."""


def token_scores(
    logprobs: Tensor,  # [n, vocabulary] float32
    tokens: Sequence[int],
    top: int,
) -> tuple[TokenScore, ...]:
    """Scores of the first tokens of a block, as many as there are."""
    kept = logprobs[: len(tokens)]
    values, ids = kept.topk(min(top, kept.shape[1]), dim=-1)
    own = kept.gather(1, kept.new_tensor(tokens, dtype=ids.dtype).unsqueeze(1)).squeeze(1)
    each = zip(own.tolist(), ids.tolist(), values.tolist(), strict=True)
    return tuple(TokenScore(one, tuple(zip(*best, strict=True))) for one, *best in each)
