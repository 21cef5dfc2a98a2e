"""How rows choose tokens on the device: greedily, or by noise that belongs to seed and position.

Sampling is arg max of logits / temperature + Gumbel noise, which draws from the softmax. The noise
of a token is a hash of the row's seed, the position and the token, so that a position's draw is the
same whoever computes it and however many tokens a forward verifies: a seed gives the same text with
a drafter and without. Drafts are drawn with the same noise, which makes them agree with the target
far more often than independent draws would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams
from domino_spec.fast.kernels.choose import choose, restrict


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How each row of a batch chooses. None stands for a batch in which no row needs it."""

    temperature: Tensor | None = None  # [rows]; 0 is greedy
    seeds: Tensor | None = None  # [rows]
    top_k: Tensor | None = None  # [rows]; 0 is off
    top_p: Tensor | None = None  # [rows]; 1 is off
    min_p: Tensor | None = None  # [rows]; 0 is off

    def choose(self, logits: Tensor, starts: Tensor) -> Tensor:
        """Tokens [rows, n] from logits [rows, n, vocabulary] of tokens at `starts` and behind.

        A choice stands one place behind the token it was made from.
        """
        rows, count, vocabulary = logits.shape
        flat = logits.reshape(-1, vocabulary)
        if self.temperature is None:
            return choose(flat).view(rows, count)
        each = _each(self, count)
        assert each.temperature is not None
        if each.top_k is not None:
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
        return choose(
            flat, temperature=each.temperature, seeds=each.seeds, positions=places.flatten()
        ).view(rows, count)

    def drafts(self, logits: Tensor, starts: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Drafts [rows, n] behind anchors at `starts`, each from logits [rows, n, k] of its own.

        `tokens` [k] are the columns' ids, where these are not all of the vocabulary's. What the
        target would cut off is not cut off here: such a draft is simply refused.
        """
        rows, count, _ = logits.shape
        flat = logits.reshape(rows * count, -1)
        if self.temperature is None:
            columns = choose(flat)
        else:
            each = _each(Draws(temperature=self.temperature, seeds=self.seeds), count)
            places = starts.unsqueeze(1) + torch.arange(1, count + 1, device=starts.device)
            columns = choose(
                flat,
                temperature=each.temperature,
                seeds=each.seeds,
                positions=places.flatten(),
                tokens=None if tokens is None else tokens.expand(rows * count, -1),
            )
        chosen = columns if tokens is None else tokens[columns]
        return chosen.view(rows, count)


def _each(draws: Draws, count: int) -> Draws:
    """The same for `count` tokens a row."""
    return replace(
        draws,
        **{
            name: value.repeat_interleave(count)
            for name, value in vars(draws).items()
            if value is not None
        },
    )


def why_not_on_device(params: SamplingParams) -> str | None:
    """What in a request needs the reference loop, in words; None if nothing does."""
    if params.processors:
        return "it has logits processors of its own"
    if params.samples and params.accept not in (None, "coupled"):
        return f"it asks for accept={params.accept!r}, and the engine's draws are coupled"
    return None


def needs_filter(params: SamplingParams) -> bool:
    """Whether some tokens are cut off before drawing."""
    return params.samples and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
