"""From hidden states to drafts: score, choose, read the choice, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from domino_spec.drafter.heads import Embed, Head
from domino_spec.drafter.model import TargetVocabulary

Choose = Callable[[int, Tensor, Tensor | None], Tensor]
"""(draft index, logits [batch, k], their ids [batch, k] or None for all) -> column [batch]."""


class Rolled(Protocol):
    """What a rollout needs of a drafter; engines that own the backbone bring only this."""

    @property
    def head(self) -> Head | None:
        """None leaves the base logits as they are."""

    @property
    def draft_tokens(self) -> Tensor | None:
        """Target ids of a reduced vocabulary."""

    def embed(self, target: TargetVocabulary, tokens: Tensor) -> Tensor:
        """The target's embeddings, in the head's own type."""

    def base_logits(self, target: TargetVocabulary, hidden: Tensor) -> Tensor:
        """The backbone's own guess, [..., output vocabulary]."""


def greedy(_index: int, logits: Tensor, _tokens: Tensor | None) -> Tensor:
    """Choose the most likely token."""
    return logits.argmax(dim=-1)


def rollout(
    drafter: Rolled,
    target: TargetVocabulary,
    *,
    hidden: Tensor,  # [batch, depth, hidden]
    anchor_tokens: Tensor,  # [batch]
    choose: Choose = greedy,
    candidates: int | None = None,
) -> Tensor:
    """Drafted tokens [batch, depth].

    All base logits come from one lm_head call and the hidden part of the head from one
    product; a step reads one token and makes one low-rank correction. With `candidates`, only
    each slot's best base candidates are corrected and can be drafted.
    """
    base = drafter.base_logits(target, hidden)  # [batch, depth, output vocabulary]
    columns: Tensor | None = None
    if candidates is not None and candidates < base.shape[-1]:
        base, columns = base.topk(candidates, dim=-1)  # both [batch, depth, candidates]
    return roll(
        drafter.head,
        partial(drafter.embed, target),
        hidden=hidden,
        anchor_tokens=anchor_tokens,
        base=base,
        columns=columns,
        draft_tokens=drafter.draft_tokens,
        choose=choose,
    )


def roll(
    head: Head | None,
    embed: Embed,
    *,
    hidden: Tensor,  # [batch, depth, hidden]
    anchor_tokens: Tensor,  # [batch]
    base: Tensor,  # [batch, depth, k]
    columns: Tensor | None,  # [batch, depth, k]: tokens of the base logits; None for all
    draft_tokens: Tensor | None,
    choose: Choose,
) -> Tensor:
    """The same from base logits that are already there."""
    if head is not None:
        projected = head.project_hidden(hidden)  # [batch, depth, ...]
        state = head.initial_state(hidden.shape[0], hidden)

    token = anchor_tokens.to(hidden.device)
    drafts = []
    for index in range(hidden.shape[1]):
        logits = base[:, index]
        tried = None if columns is None else columns[:, index]
        if head is not None:
            state = head.step(token, state, embed)
            if index >= head.prefix_len:
                logits = logits + head.correction(projected[:, index], state, tried)
        tokens = target_tokens(tried, draft_tokens, logits)
        column = choose(index, logits, tokens)
        token = column if tokens is None else tokens.gather(1, column.unsqueeze(1)).squeeze(1)
        drafts.append(token)
    return torch.stack(drafts, dim=1)


def target_tokens(
    columns: Tensor | None, draft_tokens: Tensor | None, logits: Tensor
) -> Tensor | None:
    """Target ids of each column of the logits; None where a column is its own id."""
    if draft_tokens is None:
        return columns
    if columns is None:
        return draft_tokens.expand(logits.shape[0], -1)
    return draft_tokens[columns]
