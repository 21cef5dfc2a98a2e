"""The Domino head's rollout over each slot's best candidates: one launch a draft.

All that does not depend on a choice is computed for all candidates before: their base logits, the
hidden part of the head, and what the GRU would make of each as its input (one product for all). A
launch then begins with what the last one left: every program adds up the candidates' scores, takes
the best, and computes the whole new state from its input and the carried state. That is little work
done many times, and it spares a wait for all programs, that is, a launch. Then each program
multiplies the state by its share of the rows of [W_hh ; W1's state part]: rows of W_hh give the
carried state of the next launch, rows of W1 a few ranks of the candidates' scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.drafter.heads import DominoHead
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.packing import Table, look_up
from domino_spec.engine.kernels.runtime import triton_available

if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.gumbel import noised_logits
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

MAX_ROWS = 64
TILE = 32
"""Rows of the weights that a program multiplies."""


def launch(
    head: DominoHead,
    embedding: Table,  # [vocabulary, hidden]
    hidden: Tensor,  # [rows, depth, hidden]
    anchor_tokens: Tensor,  # [rows]
    base: Tensor,  # [rows, depth, candidates]
    columns: Tensor,  # [rows, depth, candidates]
    draft_tokens: Tensor | None,
    noise: Noise | None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Drafted tokens [rows, depth], and the candidates' logits [rows, depth, candidates]."""
    rows, depth, count = columns.shape
    size, rank, prefix = head.state_size, head.output_weight.shape[1], head.prefix_len
    columns = columns.contiguous()
    tokens = columns if draft_tokens is None else draft_tokens[columns]
    weight_input, weight_state = head.prefix_gru.all_weights[0]
    weight_first = head.state_weight  # [rank, size], strided
    # The last draft is not read; the anchor comes first: [rows, 1 + (depth - 1) * count].
    read = torch.cat((anchor_tokens.unsqueeze(1), tokens[:, :-1].flatten(1)), dim=1)
    inputs = F.linear(look_up(embedding, read), weight_input)  # [rows, read, 3 * size]
    projected = head.project_hidden(hidden).contiguous()  # [rows, depth, rank]

    state_tiles, rank_tiles = -(-3 * size // TILE), -(-rank // TILE)
    states = hidden.new_empty(rows, depth, size, dtype=torch.float32)
    carried = hidden.new_empty(rows, depth, 3 * size, dtype=torch.float32)
    scores = hidden.new_empty(rows, depth, rank_tiles, count, dtype=torch.float32)
    drafts = torch.empty_like(tokens[:, :, 0], memory_format=torch.contiguous_format)
    drawn = (None, None, None) if noise is None else noise
    choice = (base.contiguous(), scores, tokens, *drawn, drafts)
    shapes = {
        "COUNT": count,
        "COUNT_PADDED": triton.next_power_of_2(count),
        "TILES": rank_tiles,
        "TILES_PADDED": triton.next_power_of_2(rank_tiles),
        "PREFIX": prefix,
        "NOISE": noise is not None,
    }
    together = overlap(hidden)
    for step in range(depth):
        # The last state carries nothing on, and a draft of the prefix needs no scores; but some
        # program must write down the draft before.
        first = 0 if step + 1 < depth else state_tiles
        stop = max(state_tiles + (rank_tiles if step >= prefix else 0), first + 1)
        _step[(stop - first, rows)](
            weight_state,
            weight_first,
            weight_first.stride(0),
            head.output_weight,
            inputs,
            projected,
            columns,
            states,
            carried,
            *choice,
            step,
            depth,
            first,
            SIZE=size,
            SIZE_PADDED=triton.next_power_of_2(size),
            RANK=rank,
            TILE=TILE,
            num_warps=8,
            **shapes,
            **together,
        )
    _last[(rows,)](*choice, depth, num_warps=1, **shapes, **together)
    if not keep:
        return drafts, None
    logits = base.to(torch.float32, copy=True)
    logits[:, prefix:] += scores[:, prefix:].sum(dim=2)  # a draft of the prefix has no scores
    return drafts, logits


if triton_available():

    @triton.jit
    def _choose(
        row,
        step,
        depth,
        base,
        scores,
        tokens,
        temperature,
        seeds,
        positions,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        TILES: tl.constexpr,
        TILES_PADDED: tl.constexpr,
        PREFIX: tl.constexpr,
        NOISE: tl.constexpr,
    ):
        """(which candidate draft `step` is, its token)."""
        candidate = tl.arange(0, COUNT_PADDED)
        inside = candidate < COUNT
        slot = row * depth + step
        place = slot * COUNT + candidate
        tile = tl.arange(0, TILES_PADDED)
        parts = tl.load(
            scores + (slot * TILES + tile[:, None]) * COUNT + candidate[None, :],
            mask=(tile < TILES)[:, None] & inside[None, :] & (step >= PREFIX),
            other=0.0,
        )
        logits = tl.load(base + place, mask=inside, other=float("-inf")).to(tl.float32)
        ids = tl.load(tokens + place, mask=inside, other=0)
        logits += tl.sum(parts, axis=0)
        if NOISE:
            logits = noised_logits(
                logits,
                ids,
                tl.load(temperature + row),
                tl.load(seeds + row),
                tl.load(positions + row) + step,
            )
        best = tl.argmax(logits, axis=0)
        return best, tl.sum(tl.where(candidate == best, ids, 0), axis=0)

    @triton.jit
    def _gate(inputs, carried):
        return tl.sigmoid(inputs.to(tl.float32) + carried)

    @triton.jit(do_not_specialize=["step", "depth", "first"])
    def _step(
        weight_state,
        weight_first,
        first_stride,
        weight_output,
        inputs,
        projected,
        columns,
        states,
        carried,
        base,
        scores,
        tokens,
        temperature,
        seeds,
        positions,
        drafts,
        step,
        depth,
        first,
        SIZE: tl.constexpr,
        SIZE_PADDED: tl.constexpr,
        RANK: tl.constexpr,
        TILE: tl.constexpr,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        TILES: tl.constexpr,
        TILES_PADDED: tl.constexpr,
        PREFIX: tl.constexpr,
        NOISE: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Choose draft step - 1, read it, and one program's share of the products after it."""
        let_next_come(OVERLAP)
        program, row = tl.program_id(0), tl.program_id(1)
        slot = row * depth + step
        lane = tl.arange(0, SIZE_PADDED)
        within = lane < SIZE

        # The weights wait for nothing, so they are asked for first.
        state_tiles: tl.constexpr = (3 * SIZE + TILE - 1) // TILE
        rank_tile = program + first - state_tiles
        ranks = rank_tile >= 0
        # A choice of values, not a branch: the compiler still sees that rows are aligned.
        own = tl.where(ranks, rank_tile, program + first) * TILE + tl.arange(0, TILE)
        there = own < tl.where(ranks, RANK, 3 * SIZE)
        source = tl.where(ranks, weight_first, weight_state)
        source += own * tl.where(ranks, first_stride, SIZE)
        weight = tl.load(
            source[:, None] + lane[None, :], mask=there[:, None] & within[None, :], other=0.0
        )
        wait_for_last(OVERLAP)
        candidate = tl.arange(0, COUNT_PADDED)
        scored = (candidate < COUNT) & ranks
        column = tl.load(columns + slot * COUNT + candidate, mask=scored, other=0)
        output = tl.load(
            weight_output + column[:, None] * RANK + own[None, :],
            mask=scored[:, None] & (own < RANK)[None, :],
            other=0.0,
        )  # [COUNT, TILE]
        hidden_part = tl.load(projected + slot * RANK + own, mask=there & ranks, other=0.0)

        going = within & (step > 0)
        before = slot - 1
        old = tl.load(states + before * SIZE + lane, mask=going, other=0.0)
        from_old = carried + before * 3 * SIZE + lane
        old_reset = tl.load(from_old, mask=going, other=0.0)
        old_update = tl.load(from_old + SIZE, mask=going, other=0.0)
        old_new = tl.load(from_old + 2 * SIZE, mask=going, other=0.0)
        read = row * (1 + (depth - 1) * COUNT)
        if step > 0:
            best, token = _choose(
                row, step - 1, depth, base, scores, tokens, temperature, seeds, positions,
                COUNT, COUNT_PADDED, TILES, TILES_PADDED, PREFIX, NOISE,
            )  # fmt: skip
            read += 1 + (step - 1) * COUNT + best
            if program == 0:
                tl.store(drafts + slot - 1, token)
        given = inputs + read * 3 * SIZE + lane
        reset = _gate(tl.load(given, mask=within, other=0.0), old_reset)
        update = _gate(tl.load(given + SIZE, mask=within, other=0.0), old_update)
        new = tl.load(given + 2 * SIZE, mask=within, other=0.0).to(tl.float32) + reset * old_new
        new = 2.0 * tl.sigmoid(2.0 * new) - 1.0  # tanh
        state = new + update * (old - new)
        if program == 0:
            tl.store(states + slot * SIZE + lane, state, mask=within)

        product = tl.sum(weight.to(tl.float32) * state[None, :], axis=1)  # [TILE]
        if ranks:
            product += hidden_part.to(tl.float32)
            product *= tl.sigmoid(product)
            part = tl.sum(output.to(tl.float32) * product[None, :], axis=1)  # [COUNT]
            tl.store(scores + (slot * TILES + rank_tile) * COUNT + candidate, part, mask=scored)
        else:
            tl.store(carried + slot * 3 * SIZE + own, product, mask=there)

    @triton.jit(do_not_specialize=["depth"])
    def _last(
        base,
        scores,
        tokens,
        temperature,
        seeds,
        positions,
        drafts,
        depth,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        TILES: tl.constexpr,
        TILES_PADDED: tl.constexpr,
        PREFIX: tl.constexpr,
        NOISE: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Choose the last draft."""
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        _, token = _choose(
            row, depth - 1, depth, base, scores, tokens, temperature, seeds, positions,
            COUNT, COUNT_PADDED, TILES, TILES_PADDED, PREFIX, NOISE,
        )  # fmt: skip
        tl.store(drafts + row * depth + depth - 1, token)
