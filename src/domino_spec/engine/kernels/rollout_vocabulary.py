"""The Domino head's rollout over the whole vocabulary: two launches a draft.

The first finds the last draft among the programs' best, reads it and computes the state, a few
elements a program; each also multiplies its elements by their columns of W1, which the second
launch adds up. The second walks over the rows of W2, and each program keeps its best.

W2 is read once a row of the batch and draft, from memory: more rows are better served by a product
over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.drafter.heads import DominoHead
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available

if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.gumbel import noised_logits
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

MAX_ROWS = 2
PROGRAMS = 264
"""Programs that share the vocabulary: two for each multiprocessor of an H200."""
STATE_TILE = 8
"""Elements of the state that a program computes."""


def launch(
    head: DominoHead,
    embedding: Tensor,  # [vocabulary, hidden]
    scale: float,  # of its rows
    hidden: Tensor,  # [rows, depth, hidden]
    anchor_tokens: Tensor,  # [rows]
    base: Tensor,  # [rows, depth, output vocabulary]
    draft_tokens: Tensor | None,
    noise: Noise | None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Drafted tokens [rows, depth], and all tokens' logits [rows, depth, output vocabulary]."""
    rows, depth, vocabulary = base.shape
    size, rank = head.state_size, head.output_weight.shape[1]
    weight_input, weight_state = head.prefix_gru.all_weights[0]
    weight_first = head.state_weight  # [rank, size], strided
    projected = head.project_hidden(hidden).contiguous()  # [rows, depth, rank]
    base = base.contiguous()

    programs, tiles = PROGRAMS, -(-size // STATE_TILE)
    states = hidden.new_empty(rows, depth, size, dtype=torch.float32)
    parts = hidden.new_empty(rows, tiles, rank, dtype=torch.float32)
    # The best score and column of each program, for each draft: [rows, depth, programs].
    values = hidden.new_empty(rows, depth, programs, dtype=torch.float32)
    columns = torch.empty_like(values, dtype=torch.int32)
    drafts = anchor_tokens.new_empty(rows, depth)
    logits = torch.empty_like(base, dtype=torch.float32) if keep else None
    drawn = (None, None, None) if noise is None else noise
    choice = (values, columns, draft_tokens, drafts)
    shapes = {"PROGRAMS": programs, "PROGRAMS_PADDED": triton.next_power_of_2(programs)}
    together = overlap(hidden)
    head_shapes = {
        "TILES": tiles,
        "RANK": rank,
        "RANK_PADDED": triton.next_power_of_2(rank),
    }
    for step in range(depth):
        _read[(tiles, rows)](
            weight_input,
            weight_state,
            weight_first,
            weight_first.stride(0),
            embedding,
            scale,
            anchor_tokens,
            states,
            parts,
            *choice,
            step,
            depth,
            vocabulary,
            hidden.shape[2],
            SIZE=size,
            STATE_TILE=STATE_TILE,
            CHUNK=256,
            num_warps=4,
            **head_shapes,
            **shapes,
            **together,
        )
        _score[(programs, rows)](
            head.output_weight,
            base,
            projected,
            parts,
            values,
            columns,
            draft_tokens,
            *drawn,
            logits,
            step,
            depth,
            vocabulary,
            PREFIX=head.prefix_len,
            NOISE=noise is not None,
            CHUNK=32,
            BLOCK=32,
            num_warps=4,
            PROGRAMS=programs,
            **head_shapes,
            **together,
        )
    _last[(rows,)](*choice, depth, vocabulary, num_warps=1, **shapes, **together)
    return drafts, logits


if triton_available():

    @triton.jit
    def _chosen(
        slot,
        values,
        columns,
        draft_tokens,
        vocabulary,
        PROGRAMS: tl.constexpr,
        PROGRAMS_PADDED: tl.constexpr,
    ):
        """The token of a slot whose programs have all kept their best; ties go to the first."""
        program = tl.arange(0, PROGRAMS_PADDED)
        inside = program < PROGRAMS
        value = tl.load(values + slot * PROGRAMS + program, mask=inside, other=float("-inf"))
        column = tl.load(columns + slot * PROGRAMS + program, mask=inside, other=vocabulary - 1)
        best = tl.where(value == tl.max(value, axis=0), column, vocabulary - 1)
        token = tl.min(best, axis=0).to(tl.int64)
        if draft_tokens is not None:
            token = tl.load(draft_tokens + token)
        return token

    @triton.jit
    def _products(
        weight,  # [3 * SIZE, width]
        vector,  # [width]
        width,
        element,  # [STATE_TILE]
        there,
        SIZE: tl.constexpr,
        STATE_TILE: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        """Three gates' rows of a weight times a vector, each [STATE_TILE]."""
        reset = tl.zeros([STATE_TILE, CHUNK], tl.float32)
        update = tl.zeros([STATE_TILE, CHUNK], tl.float32)
        new = tl.zeros([STATE_TILE, CHUNK], tl.float32)
        for at in tl.range(0, width, CHUNK, num_stages=3):
            lane = at + tl.arange(0, CHUNK)
            inside = lane < width
            part = tl.load(vector + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
            place = weight + element[:, None] * width + lane[None, :]
            mask = there[:, None] & inside[None, :]
            reset += tl.load(place, mask=mask, other=0.0).to(tl.float32) * part
            place += SIZE * width
            update += tl.load(place, mask=mask, other=0.0).to(tl.float32) * part
            place += SIZE * width
            new += tl.load(place, mask=mask, other=0.0).to(tl.float32) * part
        return tl.sum(reset, axis=1), tl.sum(update, axis=1), tl.sum(new, axis=1)

    @triton.jit(do_not_specialize=["step", "depth"])
    def _read(
        weight_input,
        weight_state,
        weight_first,
        first_stride,
        embedding,
        scale,
        anchor_tokens,
        states,
        parts,
        values,
        columns,
        draft_tokens,
        drafts,
        step,
        depth,
        vocabulary,
        hidden_size,
        STATE_TILE: tl.constexpr,
        CHUNK: tl.constexpr,
        SIZE: tl.constexpr,
        TILES: tl.constexpr,
        RANK: tl.constexpr,
        RANK_PADDED: tl.constexpr,
        PROGRAMS: tl.constexpr,
        PROGRAMS_PADDED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Some elements of the state after the last draft, and their part of W1 · state."""
        wait_for_last(OVERLAP)
        tile, row = tl.program_id(0), tl.program_id(1)
        slot = row * depth + step
        token = tl.load(anchor_tokens + row)
        if step > 0:
            token = _chosen(
                slot - 1, values, columns, draft_tokens, vocabulary, PROGRAMS, PROGRAMS_PADDED
            )
            if tile == 0:
                tl.store(drafts + slot - 1, token)
        element = tile * STATE_TILE + tl.arange(0, STATE_TILE)
        there = element < SIZE
        reset, update, new = _products(
            weight_input, embedding + token * hidden_size, hidden_size, element, there,
            SIZE, STATE_TILE, CHUNK,
        )  # fmt: skip
        reset, update, new = reset * scale, update * scale, new * scale
        if step > 0:
            carried = _products(
                weight_state, states + (slot - 1) * SIZE, SIZE, element, there,
                SIZE, STATE_TILE, CHUNK,
            )  # fmt: skip
            reset = tl.sigmoid(reset + carried[0])
            update = tl.sigmoid(update + carried[1])
            new = 2.0 * tl.sigmoid(2.0 * (new + reset * carried[2])) - 1.0  # tanh
            old = tl.load(states + (slot - 1) * SIZE + element, mask=there, other=0.0)
            new = new + update * (old - new)
        else:
            new = 2.0 * tl.sigmoid(2.0 * new) - 1.0
            new = new - tl.sigmoid(update) * new
        tl.store(states + slot * SIZE + element, new, mask=there)
        ranks = tl.arange(0, RANK_PADDED)
        first = tl.load(
            weight_first + ranks[:, None] * first_stride + element[None, :],
            mask=(ranks < RANK)[:, None] & there[None, :],
            other=0.0,
        )
        part = tl.sum(first.to(tl.float32) * new[None, :], axis=1)
        tl.store(parts + (row * TILES + tile) * RANK + ranks, part, mask=ranks < RANK)
        let_next_come(OVERLAP)  # it reads all of W2: no earlier (`overlap`)

    @triton.jit(do_not_specialize=["step", "depth"])
    def _score(
        weight_output,
        base,
        projected,
        parts,
        values,
        columns,
        draft_tokens,
        temperature,
        seeds,
        positions,
        kept,  # [rows, depth, vocabulary] float32, where logits are kept
        step,
        depth,
        vocabulary,
        PREFIX: tl.constexpr,
        NOISE: tl.constexpr,
        CHUNK: tl.constexpr,
        BLOCK: tl.constexpr,
        TILES: tl.constexpr,
        RANK: tl.constexpr,
        RANK_PADDED: tl.constexpr,
        PROGRAMS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """The best of every PROGRAMS-th block of the vocabulary."""
        wait_for_last(OVERLAP)
        program, row = tl.program_id(0), tl.program_id(1)
        slot = row * depth + step
        ranks = tl.arange(0, RANK_PADDED)
        inside = ranks < RANK
        total = tl.zeros([CHUNK, RANK_PADDED], tl.float32)
        for at in range(0, TILES, CHUNK):
            tile = at + tl.arange(0, CHUNK)
            total += tl.load(
                parts + (row * TILES + tile[:, None]) * RANK + ranks[None, :],
                mask=(tile < TILES)[:, None] & inside[None, :],
                other=0.0,
            )
        hidden_part = tl.load(projected + slot * RANK + ranks, mask=inside, other=0.0)
        active = tl.sum(total, axis=0) + hidden_part.to(tl.float32)
        active *= tl.sigmoid(active)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_column = tl.zeros([BLOCK], tl.int32)
        for at in tl.range(program * BLOCK, vocabulary, PROGRAMS * BLOCK, num_stages=3):
            column = at + tl.arange(0, BLOCK)
            there = column < vocabulary
            weight = tl.load(
                weight_output + column[:, None] * RANK + ranks[None, :],
                mask=there[:, None] & inside[None, :] & (step >= PREFIX),
                other=0.0,
            )
            logits = tl.load(base + slot * vocabulary + column, mask=there, other=float("-inf"))
            score = logits.to(tl.float32) + tl.sum(weight.to(tl.float32) * active[None, :], axis=1)
            if kept is not None:
                tl.store(kept + slot * vocabulary + column, score, mask=there)
            if NOISE:
                tokens = column
                if draft_tokens is not None:
                    tokens = tl.load(draft_tokens + column, mask=there, other=0)
                score = noised_logits(
                    score,
                    tokens,
                    tl.load(temperature + row),
                    tl.load(seeds + row),
                    tl.load(positions + row) + step,
                )
            better = score > best
            best = tl.where(better, score, best)
            best_column = tl.where(better, column, best_column)
        let_next_come(OVERLAP)
        top = tl.max(best, axis=0)
        first = tl.min(tl.where(best == top, best_column, vocabulary - 1), axis=0)
        tl.store(values + slot * PROGRAMS + program, top)
        tl.store(columns + slot * PROGRAMS + program, first)

    @triton.jit(do_not_specialize=["depth"])
    def _last(
        values,
        columns,
        draft_tokens,
        drafts,
        depth,
        vocabulary,
        PROGRAMS: tl.constexpr,
        PROGRAMS_PADDED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Write down the last draft."""
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        slot = tl.program_id(0) * depth + depth - 1
        token = _chosen(slot, values, columns, draft_tokens, vocabulary, PROGRAMS, PROGRAMS_PADDED)
        tl.store(drafts + slot, token)
