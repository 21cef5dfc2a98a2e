"""Rejection and block verification on the device, for all sequences of a batch at once.

What `decoding.sampling` does one position after the other, in a few operations that wait for
nothing: P_i = min(P_{i-1} r_i, 1) is a walk of log r reflected at 0, its sum less the highest sum
so far. Both rules then draw from max(P p - q, 0), rejection with P = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_spec.decoding.noise import ACCEPTS, RESAMPLES, hashed, salted, uniform
from domino_spec.engine.kernels.choose import choose
from domino_spec.engine.sampling import BLOCK, REJECTION, DraftLogits, Draws


def accept(
    logits: Tensor,  # [batch, n, vocabulary]: less penalties
    block: Tensor,  # [batch, n]: the anchor and the drafts
    draws: Draws,
    starts: Tensor,  # [batch]
    drawn_from: Sequence[DraftLogits],
    *,
    mixed: bool,
    lengths: Tensor | None = None,  # [batch]: drafts that were verified, where not all were
) -> tuple[Tensor, Tensor]:
    """Tokens [batch, n] and how many drafts of each sequence are accepted, [batch].

    The first accepted ones are the drafts, and the next is the sequence's new token; the others
    mean nothing. `mixed` where some sequences do not draw their drafts.
    """
    assert draws.rules is not None
    drafts = block[:, 1:]
    accepted, following = _verified(logits, drafts, draws, starts, drawn_from, lengths)
    chosen = torch.cat((drafts, following.unsqueeze(1)), dim=1)
    chosen = chosen.scatter(1, accepted.unsqueeze(1), following.unsqueeze(1))
    if mixed:
        own = draws.choose(logits, starts)
        agree = (own[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        agree = agree if lengths is None else agree.minimum(lengths)
        drawn = draws.rules >= REJECTION
        chosen = torch.where(drawn.unsqueeze(1), chosen, own)
        accepted = torch.where(drawn, accepted, agree)
    return chosen, accepted


def _verified(
    logits: Tensor,
    drafts: Tensor,
    draws: Draws,
    starts: Tensor,
    drawn_from: Sequence[DraftLogits],
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """How many drafts are accepted, and the token after them, both [batch]."""
    assert draws.temperature is not None
    assert draws.seeds is not None
    assert draws.rules is not None
    count = drafts.shape[1]
    heat = torch.where(draws.temperature > 0, draws.temperature, 1.0).view(-1, 1, 1)
    judged = draws.cut(logits.flatten(0, 1), count + 1).view_as(logits)
    p = (judged.float() / heat).softmax(dim=-1)  # [batch, n, vocabulary]
    q = [(each.logits.float() / heat).softmax(dim=-1) for each in drawn_from]
    places = torch.arange(1, count + 1, device=starts.device)
    u = uniform(
        hashed(
            salted(draws.seeds, starts, ACCEPTS).unsqueeze(1),
            starts.unsqueeze(1) + places,
            torch.zeros_like(places),
        )
    )  # [batch, depth]
    p_draft = p[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    q_draft = _of_drafts(q, drawn_from, drafts).clamp(min=torch.finfo(torch.float32).tiny)

    # Token by token, and as a block: `joint` [batch, n] is P_0 ... P_depth.
    ends = torch.full_like(starts, count) if lengths is None else lengths
    verified = places <= ends.unsqueeze(1)  # [batch, depth]
    one_by_one = ((u * q_draft < p_draft) & verified).long().cumprod(dim=1).sum(dim=1)
    walk = (p_draft.log() - q_draft.log()).cumsum(dim=1)
    joint = (walk - walk.clamp(min=0).cummax(dim=1).values).exp()
    joint = torch.cat((torch.ones_like(joint[:, :1]), joint), dim=1)
    by_block = draws.rules == BLOCK
    # After the last verified draft the next token is p's own.
    last = torch.arange(count + 1, device=starts.device) == ends.unsqueeze(1)  # [batch, n]
    scale = torch.where(by_block.unsqueeze(1) & ~last, joint, 1.0)
    left = p * scale.unsqueeze(2)
    if lengths is not None:  # what was not verified takes nothing off
        own = torch.split(verified.unsqueeze(2), [each.shape[1] for each in q], dim=1)
        q = [chances * kept for chances, kept in zip(q, own, strict=True)]
    _subtract(left, q, drawn_from)
    left.clamp_(min=0)
    room = left[:, 1:].sum(dim=2)  # [batch, depth]
    inner = joint[:, 1:]
    chance = torch.where(room > 0, room / (room + 1 - inner), 0.0)
    chance = torch.where(last[:, 1:], inner, chance)
    accepted = torch.where(by_block, _last((u < chance) & verified), one_by_one)

    at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])
    weights, plain = left.gather(1, at).squeeze(1), p.gather(1, at).squeeze(1)
    # Nothing is left where p = q up to rounding: then p itself is the limit.
    weights = torch.where(weights.sum(dim=1, keepdim=True) > 0, weights, plain)
    following = choose(
        weights.log(),
        temperature=torch.ones_like(draws.temperature),
        seeds=salted(draws.seeds, starts, RESAMPLES),
        positions=starts + 1 + accepted,
    )
    return accepted, following


def _last(success: Tensor) -> Tensor:
    """The last draft up to which a block is accepted; a failure before it does not count."""
    places = torch.arange(1, success.shape[1] + 1, device=success.device)
    return (success * places).amax(dim=1)


def _of_drafts(q: Sequence[Tensor], drawn_from: Sequence[DraftLogits], drafts: Tensor) -> Tensor:
    """The chance that each draft had, [batch, depth]."""
    found, start = [], 0
    for chances, each in zip(q, drawn_from, strict=True):
        own = drafts[:, start : start + chances.shape[1]].unsqueeze(2)
        start += chances.shape[1]
        if each.tokens is None:
            found.append(chances.gather(2, own).squeeze(2))
        else:
            found.append((chances * (each.tokens == own)).sum(dim=2))
    return torch.cat(found, dim=1)


def _subtract(left: Tensor, q: Sequence[Tensor], drawn_from: Sequence[DraftLogits]) -> None:
    """Take what drafts were drawn from off the target's weights [batch, n, vocabulary]."""
    start = 0
    for chances, each in zip(q, drawn_from, strict=True):
        part = left[:, start : start + chances.shape[1]]
        start += chances.shape[1]
        if each.tokens is None:
            part[..., : chances.shape[2]] -= chances
        else:
            part.scatter_add_(2, each.tokens.expand_as(chances), -chances)
