"""Which drafts of a batch are verified, and what their acceptance teaches: one launch each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable

MOST_SORTED = 2048
"""Drafts of a batch that one program sorts."""
MILLION = 1_000_000
KEPT = 0.98
"""Of what was observed, after each cycle in which something else was."""


@dataclass(frozen=True)
class Lengths:
    """How many drafts each sequence verifies, and where the tokens of its block lie."""

    lengths: Tensor  # [sequences]: drafts
    offsets: Tensor  # [sequences + 1]: where each one's anchor lies among all tokens
    rows: Tensor  # [tokens]: whose token it is
    steps: Tensor  # [tokens]: which one; 0 is the anchor
    promised: Tensor  # [depth] float32: accepted drafts a sequence, with a budget of 1, 2, ...
    margins: Tensor  # [sequences, depth]
    chances: Tensor  # [sequences, depth]
    sampled: Tensor  # [sequences] bool
    live: Tensor  # [sequences] bool

    @property
    def columns(self) -> Tensor:
        """For a report, [sequences, 1 + depth]: lengths, and what was promised in millionths."""
        promised = (self.promised * MILLION).long().expand(len(self.lengths), -1)
        return torch.cat((self.lengths.unsqueeze(1), promised), dim=1)


def verify_lengths(
    margins: Tensor,  # [sequences, depth] float32
    weights: Tensor,  # [2, depth, 2]: bias and slope
    sampled: Tensor,  # [sequences] bool: which weights are a sequence's
    live: Tensor,  # [sequences] bool: the others come last
    budget: int,
) -> Lengths:
    """Verify the `sequences * budget` drafts most likely to be reached and accepted."""
    count, depth = margins.shape
    if not usable(margins) or _padded(margins)[0] * _padded(margins)[1] > MOST_SORTED:
        return lengths_reference(margins, weights, sampled, live, budget)

    def whole(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.long, device=margins.device)

    found = Lengths(
        whole(count),
        whole(count + 1),
        whole(count * (budget + 1)),
        whole(count * (budget + 1)),
        margins.new_empty(depth),
        margins.contiguous(),
        torch.empty_like(margins, memory_format=torch.contiguous_format),
        sampled,
        live,
    )
    rows, places = _padded(margins)
    _lengths[(1,)](
        found.margins,
        weights,
        sampled,
        live,
        found.chances,
        found.lengths,
        found.offsets,
        found.rows,
        found.steps,
        found.promised,
        count,
        depth,
        budget,
        ROWS=rows,
        PLACES=places,
        num_warps=8,
        **overlap(margins),
    )
    return found


def _padded(margins: Tensor) -> tuple[int, int]:
    """Powers of two, of which the second has room for the anchor."""
    return triton.next_power_of_2(len(margins)), triton.next_power_of_2(margins.shape[1] + 1)


def lengths_reference(
    margins: Tensor, weights: Tensor, sampled: Tensor, live: Tensor, budget: int
) -> Lengths:
    """What `verify_lengths` does."""
    count, depth = margins.shape
    own = weights[sampled.long()]  # [sequences, depth, 2]
    chances = torch.sigmoid(own[..., 0] + own[..., 1] * margins)
    reached = chances.cumprod(dim=1).where(live.unsqueeze(1), -1.0)
    # By place, then by sequence: of equal products the earlier place comes first.
    order = reached.T.flatten().argsort(descending=True, stable=True)
    places = torch.arange(count * depth, device=margins.device)
    ranks = torch.empty_like(places).scatter(0, order, places).view(depth, count).T
    lengths = (ranks < count * budget).sum(dim=1)
    offsets = torch.cat((lengths.new_zeros(1), (lengths + 1).cumsum(dim=0)))
    tokens = torch.arange(count * (budget + 1), device=margins.device)
    rows = torch.searchsorted(offsets[1:], tokens, right=True)
    budgets = torch.arange(1, depth + 1, device=margins.device).view(-1, 1, 1)
    promised = (reached.clamp(min=0) * (ranks < count * budgets)).sum(dim=(1, 2))
    return Lengths(
        lengths,
        offsets,
        rows,
        tokens - offsets[rows],
        promised / live.sum().clamp(min=1),
        margins,
        chances,
        sampled,
        live,
    )


def learn(
    lengths: Lengths,
    accepted: Tensor,  # [sequences]
    weights: Tensor,  # [2, depth, 2]
    information: Tensor,  # [2, depth, 3]
    prior: Tensor,  # [3]
) -> None:
    """One step of logistic regression on the drafts that were verified and reached.

    The curvature of a chance is taken at its most, a quarter: such a step never goes too far.
    """
    rows = len(accepted)
    if not usable(weights) or rows * lengths.margins.shape[1] > 2 * MOST_SORTED:
        learn_reference(lengths, accepted, weights, information, prior)
        return
    places = _padded(lengths.margins)
    _learn[(1,)](
        lengths.margins,
        lengths.chances,
        lengths.lengths,
        accepted,
        accepted.stride(0),
        lengths.sampled,
        lengths.live,
        weights,
        information,
        prior,
        rows,
        lengths.margins.shape[1],
        KEPT=KEPT,
        ROWS=places[0],
        PLACES=places[1],
        num_warps=8,
        **overlap(weights),
    )


def learn_reference(
    lengths: Lengths, accepted: Tensor, weights: Tensor, information: Tensor, prior: Tensor
) -> None:
    """What `learn` does."""
    margins, chances = lengths.margins, lengths.chances
    places = torch.arange(margins.shape[1], device=margins.device)
    reach = torch.minimum(lengths.lengths, accepted + 1).unsqueeze(1)
    seen = ((places < reach) & lengths.live.unsqueeze(1)).float()
    error = ((places < accepted.unsqueeze(1)).float() - chances) * seen
    kinds = torch.stack((~lengths.sampled, lengths.sampled)).float()  # [2, sequences]
    squares = torch.stack((seen, seen * margins, seen * margins * margins), dim=2) / 4
    found = torch.einsum("ks,sdj->kdj", kinds, squares)
    gradient = torch.einsum("ks,sdj->kdj", kinds, torch.stack((error, error * margins), dim=2))
    faded = KEPT * information + (1 - KEPT) * prior
    information.copy_(torch.where(found[..., :1] > 0, faded + found, information))
    one, margin, square = information.unbind(2)
    down = one * square - margin * margin
    bias = (square * gradient[..., 0] - margin * gradient[..., 1]) / down
    slope = (one * gradient[..., 1] - margin * gradient[..., 0]) / down
    weights[..., 0] += bias
    weights[..., 1] = (weights[..., 1] + slope).clamp(min=0)


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.keys import pack
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit(do_not_specialize=["count", "depth", "budget"])
    def _lengths(
        margins,
        weights,
        sampled,
        live,
        chances,
        lengths,
        offsets,
        rows,
        steps,
        promised,
        count,
        depth,
        budget,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for the whole batch: [ROWS, PLACES] drafts."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row, place = tl.arange(0, ROWS), tl.arange(0, PLACES)
        there = row < count
        inside = there[:, None] & (place < depth)[None, :]
        spot = row[:, None] * depth + place[None, :]
        kind = tl.load(sampled + row, mask=there, other=0).to(tl.int32)
        alive = tl.load(live + row, mask=there, other=0) != 0
        own = (kind[:, None] * depth + place[None, :]) * 2
        bias = tl.load(weights + own, mask=inside, other=0.0)
        slope = tl.load(weights + own + 1, mask=inside, other=0.0)
        margin = tl.load(margins + spot, mask=inside, other=0.0)
        chance = tl.sigmoid(bias + slope * margin)
        tl.store(chances + spot, chance, mask=inside)
        reached = tl.cumprod(tl.where(inside, chance, 1.0), axis=1)
        reached = tl.where(alive[:, None], reached, -1.0)

        # Of equal products the earlier place comes first, so that each row's are its first ones.
        key = pack(reached, place[None, :] * count + row[:, None])
        key = tl.where(inside, key, -(2**63))
        ordered = tl.sort(tl.reshape(key, (ROWS * PLACES,)), descending=True)
        entry = tl.arange(0, ROWS * PLACES)
        least = tl.sum(tl.where(entry == count * budget - 1, ordered, 0), axis=0)
        length = tl.sum(tl.where(inside & (key >= least), 1, 0), axis=1)
        ends = tl.cumsum(tl.where(there, length + 1, 0), axis=0)
        start = ends - length - 1
        tl.store(lengths + row, length.to(tl.int64), mask=there)
        tl.store(offsets + row + 1, ends.to(tl.int64), mask=there)
        tl.store(offsets + row, start.to(tl.int64), mask=row == 0)
        token = start[:, None] + place[None, :]
        verified = there[:, None] & (place[None, :] <= length[:, None])
        whose = row[:, None] + place[None, :] * 0
        tl.store(rows + token, whose.to(tl.int64), mask=verified)
        step = place[None, :] + row[:, None] * 0
        tl.store(steps + token, step.to(tl.int64), mask=verified)

        product = (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        product = tl.where(ordered > 0, product, 0.0)
        sequences = tl.maximum(tl.sum(alive.to(tl.int32), axis=0), 1)
        for each in range(depth):
            total = tl.sum(tl.where(entry < count * (each + 1), product, 0.0), axis=0)
            tl.store(promised + each, total / sequences)

    @triton.jit(do_not_specialize=["accepted_stride", "count", "depth"])
    def _learn(
        margins,
        chances,
        lengths,
        accepted,
        accepted_stride,
        sampled,
        live,
        weights,
        information,
        prior,
        count,
        depth,
        KEPT: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for the whole batch."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row, place = tl.arange(0, ROWS), tl.arange(0, PLACES)
        there = row < count
        used = place < depth
        inside = there[:, None] & used[None, :]
        spot = row[:, None] * depth + place[None, :]
        taken = tl.load(accepted + row * accepted_stride, mask=there, other=0).to(tl.int32)
        length = tl.load(lengths + row, mask=there, other=0).to(tl.int32)
        kind = tl.load(sampled + row, mask=there, other=0).to(tl.int32)
        alive = tl.load(live + row, mask=there, other=0) != 0
        margin = tl.load(margins + spot, mask=inside, other=0.0)
        chance = tl.load(chances + spot, mask=inside, other=0.0)
        reach = tl.minimum(length, taken + 1)
        seen = inside & alive[:, None] & (place[None, :] < reach[:, None])
        right = tl.where(place[None, :] < taken[:, None], 1.0, 0.0)
        for each in range(2):
            mine = seen & (kind == each)[:, None]
            weight = tl.where(mine, 0.25, 0.0)
            error = tl.where(mine, right - chance, 0.0)
            ones = tl.sum(weight, axis=0)
            firsts = tl.sum(weight * margin, axis=0)
            squares = tl.sum(weight * margin * margin, axis=0)
            pull, tilt = tl.sum(error, axis=0), tl.sum(error * margin, axis=0)
            own = information + (each * depth + place) * 3
            any_seen = ones > 0
            one = tl.load(own, mask=used, other=1.0)
            first = tl.load(own + 1, mask=used, other=0.0)
            square = tl.load(own + 2, mask=used, other=1.0)
            rest = 1.0 - KEPT
            one = tl.where(any_seen, KEPT * one + rest * tl.load(prior) + ones, one)
            first = tl.where(any_seen, KEPT * first + rest * tl.load(prior + 1) + firsts, first)
            square = tl.where(any_seen, KEPT * square + rest * tl.load(prior + 2) + squares, square)
            tl.store(own, one, mask=used)
            tl.store(own + 1, first, mask=used)
            tl.store(own + 2, square, mask=used)
            down = one * square - first * first
            mine_weights = weights + (each * depth + place) * 2
            bias = tl.load(mine_weights, mask=used, other=0.0)
            slope = tl.load(mine_weights + 1, mask=used, other=0.0)
            bias += (square * pull - first * tilt) / down
            slope += (one * tilt - first * pull) / down
            tl.store(mine_weights, bias, mask=used)
            tl.store(mine_weights + 1, tl.maximum(slope, 0.0), mask=used)
