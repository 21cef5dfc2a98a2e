"""How sequences choose tokens on the device: greedily, or by noise of seed and position.

Sampling is arg max of logits / temperature + Gumbel noise, which draws from the softmax. The noise
of a token is a hash of the sequence's seed, the position and the token, so that a position's draw
is the same in every loop and however many tokens a forward verifies: a seed gives the same text
with a drafter and without. Under the coupled rule drafts are drawn with the same noise, which makes
them agree with the target far more often than independent draws would. Rejection and block
verification draw them with noise of their own and look at what they were drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from domino_spec.decoding import SamplingParams, Sequence
from domino_spec.decoding.noise import DRAFTS, noised, salted
from domino_spec.engine.kernels.choose import choose, restrict
from domino_spec.settings import AcceptRule

RULES: tuple[AcceptRule, ...] = get_args(AcceptRule)
"""A slot's rule is its place in here."""
MATCH, REJECTION, BLOCK = map(RULES.index, ("match", "rejection", "block"))


@dataclass(frozen=True)
class DraftLogits:
    """What some drafts were drawn from: logits [batch, n, k] of these tokens (None = all)."""

    logits: Tensor
    tokens: Tensor | None  # [k], or [batch, n, k]


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How each sequence of a batch chooses. None stands for a batch in which none needs it."""

    temperature: Tensor | None = None  # [batch]; 0 is greedy
    seeds: Tensor | None = None  # [batch]
    top_k: Tensor | None = None  # [batch]; 0 is off
    top_p: Tensor | None = None  # [batch]; 1 is off
    min_p: Tensor | None = None  # [batch]; 0 is off
    rules: Tensor | None = None  # [batch]: places in `RULES`; None where all are coupled
    kept: list[DraftLogits] | None = field(default=None, compare=False)
    """Where drafts that are drawn leave what they were drawn from, one lot after the other."""

    def for_drafts(self, starts: Tensor, *, keep: bool = False) -> Draws:
        """How the drafts of a cycle from `starts` [batch] on are chosen.

        Their logits are kept where an accept rule asks for them, or `keep` does.
        """
        if self.rules is None:
            return replace(self, kept=[]) if keep else self
        assert self.temperature is not None
        assert self.seeds is not None
        return replace(
            self,
            temperature=torch.where(self.rules == MATCH, 0.0, self.temperature),
            seeds=torch.where(
                self.rules >= REJECTION, salted(self.seeds, starts, DRAFTS), self.seeds
            ),
            kept=[],
        )

    def keep(self, logits: Tensor, tokens: Tensor | None) -> None:
        """Logits [batch, n, k] that drafts were drawn from, where that is asked for."""
        if self.kept is not None:
            self.kept.append(DraftLogits(logits, tokens))

    def cut(self, logits: Tensor, count: int) -> Tensor:
        """Logits [batch * count, k] without the tokens that are cut off."""
        if self.top_k is None:
            return logits
        each = _each(self, count)
        assert each.temperature is not None
        return restrict(
            logits,
            temperature=each.temperature,
            top_k=each.top_k,
            top_p=each.top_p,
            min_p=each.min_p,
        )

    def choose(
        self,
        logits: Tensor,
        starts: Tensor,
        tokens: Tensor | None = None,
        *,
        cut: bool = True,
        positions: Tensor | None = None,  # [batch, n]
    ) -> Tensor:
        """Tokens [batch, n] from logits [batch, n, k] of tokens from `starts` on.

        A choice stands one position after the token it was made from, whose own may be given.
        `tokens` [k] are the columns' ids, where these are not the whole vocabulary's.
        """
        batch, count, width = logits.shape
        flat = logits.reshape(-1, width)
        if self.temperature is None:
            return _named(choose(flat), tokens).view(batch, count)
        each = _each(self, count)
        flat = self.cut(flat, count) if cut else flat
        if positions is None:
            positions = starts.unsqueeze(1) + torch.arange(count, device=starts.device)
        columns = choose(
            flat,
            temperature=each.temperature,
            seeds=each.seeds,
            positions=(positions + 1).flatten(),
            tokens=None if tokens is None else tokens.expand(batch * count, -1),
        )
        return _named(columns, tokens).view(batch, count)

    def choose_drafts(self, logits: Tensor, starts: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Drafts: what the target would cut off is not cut off here, but simply refused."""
        self.keep(logits, tokens)
        return self.choose(logits, starts, tokens, cut=False)

    def tree_scores(
        self, index: int, logits: Tensor, starts: Tensor, tokens: Tensor | None
    ) -> Tensor:
        """The noise is the token's own, whatever the path to it."""
        if self.temperature is None:
            return logits
        assert self.seeds is not None
        if tokens is None:
            tokens = torch.arange(logits.shape[2], device=logits.device).unsqueeze(0)
        places = starts + index + 1
        noise = noised(torch.zeros_like(logits[:, 0]), tokens, self.temperature, self.seeds, places)
        heat = torch.where(self.temperature > 0, self.temperature, 1.0).view(-1, 1, 1)
        return logits.float() / heat + noise.unsqueeze(1)


def _named(columns: Tensor, tokens: Tensor | None) -> Tensor:
    return columns if tokens is None else tokens[columns]


def _each(draws: Draws, count: int) -> Draws:
    """The same for `count` tokens a sequence."""
    each: dict[str, Any] = {
        name: value.repeat_interleave(count)
        for name, value in vars(draws).items()
        if isinstance(value, Tensor)
    }
    return replace(draws, **each)


def unsupported_reason(sequence: Sequence) -> str | None:
    """What in a request needs the reference loop, in words; None if nothing does."""
    params = sequence.params
    if sequence.multimodal_inputs:
        return "its prompt holds images"
    if params.samples and params.hooked and params.rule != "coupled":
        return (
            f"it asks for accept={params.accept!r} with processors or hooks, with which the "
            "engine's draws are coupled"
        )
    return None


def needs_filter(params: SamplingParams) -> bool:
    """Whether some tokens are cut off before drawing."""
    return params.samples and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
