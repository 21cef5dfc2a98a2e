"""How sequences choose tokens on the device: greedily, or by noise of seed and position.

Sampling is arg max of logits / temperature + Gumbel noise, which draws from the softmax. The noise
of a token is a hash of the sequence's seed, the position and the token, so that a position's draw
is the same in every loop and however many tokens a forward verifies: a seed gives the same text
with a drafter and without. Drafts are drawn with the same noise, which makes them agree with the
target far more often than independent draws would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.engine.kernels.choose import choose, restrict


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How each sequence of a batch chooses. None stands for a batch in which none needs it."""

    temperature: Tensor | None = None  # [batch]; 0 is greedy
    seeds: Tensor | None = None  # [batch]
    top_k: Tensor | None = None  # [batch]; 0 is off
    top_p: Tensor | None = None  # [batch]; 1 is off
    min_p: Tensor | None = None  # [batch]; 0 is off

    def choose(
        self, logits: Tensor, starts: Tensor, tokens: Tensor | None = None, *, cut: bool = True
    ) -> Tensor:
        """Tokens [batch, n] from logits [batch, n, k] of tokens from `starts` on.

        A choice stands one position after the token it was made from. `tokens` [k] are the columns'
        ids, where these are not the whole vocabulary's.
        """
        batch, count, width = logits.shape
        flat = logits.reshape(-1, width)
        if self.temperature is None:
            return _named(choose(flat), tokens).view(batch, count)
        each = _each(self, count)
        assert each.temperature is not None
        if cut and each.top_k is not None:
            assert each.top_p is not None
            assert each.min_p is not None
            flat = restrict(
                flat,
                temperature=each.temperature,
                top_k=each.top_k,
                top_p=each.top_p,
                min_p=each.min_p,
            )
        places = starts.unsqueeze(1) + torch.arange(1, count + 1, device=starts.device)
        columns = choose(
            flat,
            temperature=each.temperature,
            seeds=each.seeds,
            positions=places.flatten(),
            tokens=None if tokens is None else tokens.expand(batch * count, -1),
        )
        return _named(columns, tokens).view(batch, count)

    def choose_drafts(self, logits: Tensor, starts: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Drafts: what the target would cut off is not cut off here, but simply refused."""
        return self.choose(logits, starts, tokens, cut=False)


def _named(columns: Tensor, tokens: Tensor | None) -> Tensor:
    return columns if tokens is None else tokens[columns]


def _each(draws: Draws, count: int) -> Draws:
    """The same for `count` tokens a sequence."""
    return replace(
        draws,
        **{
            name: value.repeat_interleave(count)
            for name, value in vars(draws).items()
            if value is not None
        },
    )


def unsupported_reason(params: SamplingParams) -> str | None:
    """What in a request needs the reference loop, in words; None if nothing does."""
    if params.samples and params.accept not in (None, "coupled"):
        return f"it asks for accept={params.accept!r}, and the engine's draws are coupled"
    return None


def needs_filter(params: SamplingParams) -> bool:
    """Whether some tokens are cut off before drawing."""
    return params.samples and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
