"""Which drafts of a batch are verified, and what their acceptance teaches: a launch each.

What follows of the choice (where each token lies, what is reported) is written by the same launch:
on a GPU a dozen small operations would cost more than the whole choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable
from domino_spec.engine.kernels.topk import top_candidates

MOST_SORTED = 2048
"""Drafts of a batch that one program sorts."""
MOST_READ = 1024
"""Logits of a draft that one program reads."""
MOST_MARGIN = 16.0
MILLION = 1_000_000
KEPT = 0.98
"""Of what was observed, after each cycle in which something else was."""


@dataclass(frozen=True)
class Sequences:
    """Sequences whose drafts share a budget."""

    slots: Tensor  # [sequences]
    starts: Tensor  # [sequences]
    spare: int
    """The slot of those that only fill up the batch: their drafts come last."""
    temperature: Tensor | None = None  # [sequences]; None where all are greedy

    @property
    def live(self) -> Tensor:
        """Which sequences do not only fill up the batch, [sequences] bool."""
        return self.slots != self.spare

    @property
    def sampled(self) -> Tensor:
        """Which sequences sample, [sequences] bool."""
        if self.temperature is None:
            return torch.zeros_like(self.slots, dtype=torch.bool)
        return self.temperature > 0


@dataclass(frozen=True)
class Lengths:
    """How many drafts each sequence verifies, and where the tokens of its block lie."""

    batch: Sequences
    margins: Tensor  # [sequences, depth]
    chances: Tensor  # [sequences, depth]
    offsets: Tensor  # [sequences + 1]: where each one's anchor lies among all tokens
    rows: Tensor  # [tokens]: whose token it is
    steps: Tensor  # [tokens]: which one; 0 is the anchor
    slots: Tensor  # [tokens]: where it goes, ...
    places: Tensor  # [tokens]: ... and to which place there
    columns: Tensor
    """For a report, [sequences, 1 + depth]: how many drafts each verifies, and in millionths the
    accepted drafts a sequence that budgets of 1, 2, ... promise."""

    @property
    def verified(self) -> Tensor:
        """Drafts, [sequences]."""
        return self.columns[:, 0]


def margins(
    logits: Tensor,  # [sequences, n, k]
) -> Tensor:  # [sequences, n] float32
    """How far the best logit of each draft is ahead of the second, 0 where that is no number."""
    flat = logits.flatten(0, 1)
    if not usable(logits) or flat.shape[1] > MOST_READ:
        best, _ = top_candidates(flat, min(2, flat.shape[1]))
        found = (best[:, 0].float() - best[:, -1].float()).clamp(max=MOST_MARGIN)
        return torch.nan_to_num(found).view(logits.shape[:2])
    flat = flat.contiguous()
    found = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    _margins[(len(flat),)](
        flat,
        found,
        flat.shape[1],
        MOST=MOST_MARGIN,
        WIDTH=triton.next_power_of_2(flat.shape[1]),
        num_warps=1,
        **overlap(flat),
    )
    return found


def verify_lengths(
    margins: Tensor,  # [sequences, depth] float32
    weights: Tensor,  # [2, depth or more, 2]: bias and slope of greedy sequences, and sampled ones
    batch: Sequences,
    budget: int,
) -> Lengths:
    """Verify the `sequences * budget` drafts most likely to be reached and accepted."""
    count, depth = margins.shape
    if not usable(margins) or _padded(margins)[0] * _padded(margins)[1] > MOST_SORTED:
        return lengths_reference(margins, weights, batch, budget)

    def whole(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.long, device=margins.device)

    tokens = count * (budget + 1)
    found = Lengths(
        batch,
        margins.contiguous(),
        torch.empty_like(margins, memory_format=torch.contiguous_format),
        whole(count + 1),
        whole(tokens),
        whole(tokens),
        whole(tokens),
        whole(tokens),
        whole(count, 1 + depth),
    )
    rows, places = _padded(margins)
    _lengths[(1,)](
        found.margins,
        weights,
        weights.shape[1],
        batch.temperature,
        batch.slots,
        batch.starts,
        batch.spare,
        found.chances,
        found.offsets,
        found.rows,
        found.steps,
        found.slots,
        found.places,
        found.columns,
        count,
        depth,
        budget,
        MILLION=MILLION,
        ROWS=rows,
        PLACES=places,
        num_warps=8,
        **overlap(margins),
    )
    return found


def _padded(margins: Tensor) -> tuple[int, int]:
    """Powers of two, of which the second has room for the anchor."""
    return triton.next_power_of_2(len(margins)), triton.next_power_of_2(margins.shape[1] + 1)


def lengths_reference(margins: Tensor, weights: Tensor, batch: Sequences, budget: int) -> Lengths:
    """What `verify_lengths` does."""
    count, depth = margins.shape
    own = weights[batch.sampled.long(), :depth]  # [sequences, depth, 2]
    chances = torch.sigmoid(own[..., 0] + own[..., 1] * margins)
    # Rounding must not make a later product the larger one: it may look at a drawn token.
    reached = chances.cumprod(dim=1).cummin(dim=1).values.where(batch.live.unsqueeze(1), -1.0)
    # By place, then by sequence: of equal products the earlier place comes first.
    order = reached.T.flatten().argsort(descending=True, stable=True)
    each = torch.arange(count * depth, device=margins.device)
    ranks = torch.empty_like(each).scatter(0, order, each).view(depth, count).T
    lengths = (ranks < count * budget).sum(dim=1)
    offsets = torch.cat((lengths.new_zeros(1), (lengths + 1).cumsum(dim=0)))
    tokens = torch.arange(count * (budget + 1), device=margins.device)
    rows = torch.searchsorted(offsets[1:], tokens, right=True)
    steps = tokens - offsets[rows]
    budgets = torch.arange(1, depth + 1, device=margins.device).view(-1, 1, 1)
    promised = (reached.clamp(min=0) * (ranks < count * budgets)).sum(dim=(1, 2))
    promised = (promised / batch.live.sum().clamp(min=1) * MILLION).long().expand(count, -1)
    return Lengths(
        batch,
        margins,
        chances,
        offsets,
        rows,
        steps,
        batch.slots[rows],
        batch.starts[rows] + steps,
        torch.cat((lengths.unsqueeze(1), promised), dim=1),
    )


def pad_tokens(
    tokens: Tensor,  # [tokens, 1] int64
    lengths: Lengths,
    width: int,
) -> Tensor:
    """Tokens chosen after the verified ones as [sequences, width]; the rest repeats the last."""
    if not usable(tokens):
        return tokens[padded_places(lengths, width), 0]
    found = tokens.new_empty(len(lengths.batch.slots), width)
    _pad_tokens[(len(found),)](
        tokens,
        lengths.offsets,
        found,
        width,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
        **overlap(tokens),
    )
    return found


def padded_places(lengths: Lengths, width: int) -> Tensor:
    """Which packed token stands at each place of whole blocks, [sequences, width]."""
    steps = torch.arange(width, device=lengths.offsets.device)
    return lengths.offsets[:-1].unsqueeze(1) + steps.minimum(lengths.verified.unsqueeze(1))


def learn(
    lengths: Lengths,
    accepted: Tensor,  # [sequences]
    weights: Tensor,  # [2, depth or more, 2]
    information: Tensor,  # [2, depth or more, 3]
    prior: Tensor,  # [3]
) -> None:
    """One step of logistic regression on the drafts that were verified and reached.

    The curvature of a chance is taken at its most, a quarter: such a step never goes too far.
    """
    rows, places = len(accepted), lengths.margins.shape[1]
    if not usable(weights) or rows * places > 2 * MOST_SORTED:
        learn_reference(lengths, accepted, weights, information, prior)
        return
    _learn[(1,)](
        lengths.margins,
        lengths.chances,
        lengths.columns,
        accepted,
        accepted.stride(0),
        lengths.batch.temperature,
        lengths.batch.slots,
        lengths.batch.spare,
        weights,
        information,
        weights.shape[1],
        prior,
        rows,
        places,
        KEPT=KEPT,
        ROWS=triton.next_power_of_2(rows),
        PLACES=triton.next_power_of_2(places),
        num_warps=8,
        **overlap(weights),
    )


def learn_reference(
    lengths: Lengths, accepted: Tensor, weights: Tensor, information: Tensor, prior: Tensor
) -> None:
    """What `learn` does."""
    margins, chances, batch = lengths.margins, lengths.chances, lengths.batch
    weights, information = (each[:, : margins.shape[1]] for each in (weights, information))
    places = torch.arange(margins.shape[1], device=margins.device)
    reach = torch.minimum(lengths.verified, accepted + 1).unsqueeze(1)
    seen = ((places < reach) & batch.live.unsqueeze(1)).float()
    error = ((places < accepted.unsqueeze(1)).float() - chances) * seen
    kinds = torch.stack((~batch.sampled, batch.sampled)).float()  # [2, sequences]
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

    @triton.jit(do_not_specialize=["k"])
    def _margins(
        logits,
        found,
        k,
        MOST: tl.constexpr,
        WIDTH: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one draft."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        draft, lane = tl.program_id(0), tl.arange(0, WIDTH)
        low = float("-inf")
        logit = tl.load(logits + draft * k + lane, mask=lane < k, other=low).to(tl.float32)
        best = tl.argmax(logit, axis=0)
        second = tl.max(tl.where(lane == best, low, logit), axis=0)
        top = tl.max(logit, axis=0)
        some = top > low  # of no token a chance, none is ahead
        margin = tl.where(some, top, 0.0) - tl.where(some, second, 0.0)
        margin = tl.where((k > 1) & (margin == margin), tl.minimum(margin, MOST), 0.0)
        tl.store(found + draft, margin)

    @triton.jit
    def _least(one, other):
        return tl.minimum(one, other)

    @triton.jit
    def _drafts(count, depth, ROWS: tl.constexpr, PLACES: tl.constexpr):
        """(sequences, places, which sequences and which drafts there are, where drafts lie)."""
        row, place = tl.arange(0, ROWS), tl.arange(0, PLACES)
        there = row < count
        inside = there[:, None] & (place < depth)[None, :]
        return row, place, there, inside, row[:, None] * depth + place[None, :]

    @triton.jit
    def _who(row, there, temperature, slots, spare):
        """(0 for greedy sequences and 1 for those that sample, which are live) of rows."""
        kind = row * 0
        if temperature is not None:
            kind = (tl.load(temperature + row, mask=there, other=0.0) > 0).to(tl.int32)
        return kind, there & (tl.load(slots + row, mask=there, other=0) != spare)

    @triton.jit(do_not_specialize=["all_places", "spare", "count", "depth", "budget"])
    def _lengths(
        margins,
        weights,
        all_places,  # of the weights
        temperature,  # [sequences], or None
        slots,
        starts,
        spare,
        chances,
        offsets,
        rows,
        steps,
        token_slots,
        token_places,
        columns,
        count,
        depth,
        budget,
        MILLION: tl.constexpr,
        ROWS: tl.constexpr,
        PLACES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for the whole batch: [ROWS, PLACES] drafts."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row, place, there, inside, spot = _drafts(count, depth, ROWS, PLACES)
        kind, live = _who(row, there, temperature, slots, spare)
        own = (kind[:, None] * all_places + place[None, :]) * 2
        bias = tl.load(weights + own, mask=inside, other=0.0)
        slope = tl.load(weights + own + 1, mask=inside, other=0.0)
        margin = tl.load(margins + spot, mask=inside, other=0.0)
        chance = tl.sigmoid(bias + slope * margin)
        tl.store(chances + spot, chance, mask=inside)
        reached = tl.cumprod(tl.where(inside, chance, 1.0), axis=1)
        reached = tl.associative_scan(reached, 1, _least)
        reached = tl.where(live[:, None], reached, -1.0)

        # Of equal products the earlier place comes first, so that each row's are its first ones.
        key = pack(reached, place[None, :] * count + row[:, None])
        key = tl.where(inside, key, -(2**63))
        ordered = tl.sort(tl.reshape(key, (ROWS * PLACES,)), descending=True)
        entry = tl.arange(0, ROWS * PLACES)
        least = tl.sum(tl.where(entry == count * budget - 1, ordered, 0), axis=0)
        length = tl.sum(tl.where(inside & (key >= least), 1, 0), axis=1)
        ends = tl.cumsum(tl.where(there, length + 1, 0), axis=0)
        first = ends - length - 1
        tl.store(offsets + row + 1, ends.to(tl.int64), mask=there)
        tl.store(offsets + row, first.to(tl.int64), mask=row == 0)
        token = first[:, None] + place[None, :]
        verified = there[:, None] & (place[None, :] <= length[:, None])
        tl.store(rows + token, (row[:, None] + place[None, :] * 0).to(tl.int64), mask=verified)
        tl.store(steps + token, (place[None, :] + row[:, None] * 0).to(tl.int64), mask=verified)
        slot = tl.load(slots + row, mask=there, other=0)
        start = tl.load(starts + row, mask=there, other=0)
        tl.store(token_slots + token, slot[:, None] + place[None, :] * 0, mask=verified)
        tl.store(token_places + token, start[:, None] + place[None, :], mask=verified)

        report = columns + row * (1 + depth)
        tl.store(report, length.to(tl.int64), mask=there)
        product = (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        product = tl.where(ordered > 0, product, 0.0)
        sequences = tl.maximum(tl.sum(live.to(tl.int32), axis=0), 1)
        for each in range(depth):
            total = tl.sum(tl.where(entry < count * (each + 1), product, 0.0), axis=0)
            promised = (total / sequences * MILLION).to(tl.int64)
            tl.store(report + 1 + each, promised + row * 0, mask=there)

    @triton.jit(do_not_specialize=["width"])
    def _pad_tokens(tokens, offsets, found, width, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
        """One program for one sequence."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row, place = tl.program_id(0), tl.arange(0, WIDTH)
        first, end = tl.load(offsets + row), tl.load(offsets + row + 1)
        token = tl.load(tokens + tl.minimum(first + place, end - 1))
        tl.store(found + row * width + place, token, mask=place < width)

    @triton.jit(do_not_specialize=["accepted_stride", "spare", "all_places", "count", "depth"])
    def _learn(
        margins,
        chances,
        columns,
        accepted,
        accepted_stride,
        temperature,  # [sequences], or None
        slots,
        spare,
        weights,
        information,
        all_places,  # of both
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
        row, place, there, inside, spot = _drafts(count, depth, ROWS, PLACES)
        used = place < depth
        taken = tl.load(accepted + row * accepted_stride, mask=there, other=0).to(tl.int32)
        length = tl.load(columns + row * (1 + depth), mask=there, other=0).to(tl.int32)
        kind, live = _who(row, there, temperature, slots, spare)
        margin = tl.load(margins + spot, mask=inside, other=0.0)
        chance = tl.load(chances + spot, mask=inside, other=0.0)
        reach = tl.minimum(length, taken + 1)
        seen = inside & live[:, None] & (place[None, :] < reach[:, None])
        right = tl.where(place[None, :] < taken[:, None], 1.0, 0.0)
        for each in range(2):
            mine = seen & (kind == each)[:, None]
            weight = tl.where(mine, 0.25, 0.0)
            error = tl.where(mine, right - chance, 0.0)
            ones = tl.sum(weight, axis=0)
            firsts = tl.sum(weight * margin, axis=0)
            squares = tl.sum(weight * margin * margin, axis=0)
            pull, tilt = tl.sum(error, axis=0), tl.sum(error * margin, axis=0)
            own = information + (each * all_places + place) * 3
            one = tl.load(own, mask=used, other=1.0)
            first = tl.load(own + 1, mask=used, other=0.0)
            square = tl.load(own + 2, mask=used, other=1.0)
            rest, new = 1.0 - KEPT, ones > 0
            one = tl.where(new, KEPT * one + rest * tl.load(prior) + ones, one)
            first = tl.where(new, KEPT * first + rest * tl.load(prior + 1) + firsts, first)
            square = tl.where(new, KEPT * square + rest * tl.load(prior + 2) + squares, square)
            tl.store(own, one, mask=used)
            tl.store(own + 1, first, mask=used)
            tl.store(own + 2, square, mask=used)
            down = one * square - first * first
            line = weights + (each * all_places + place) * 2
            bias = tl.load(line, mask=used, other=0.0)
            slope = tl.load(line + 1, mask=used, other=0.0)
            bias += (square * pull - first * tilt) / down
            slope += (one * tilt - first * pull) / down
            tl.store(line, bias, mask=used)
            tl.store(line + 1, tl.maximum(slope, 0.0), mask=used)
