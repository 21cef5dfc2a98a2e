"""Draft trees over each depth's best candidates: `drafter.tree.grow`, on the device.

With a Domino head two launches a depth. The first finds the lanes of the depth among the children
of the last one's and computes their states; every program does the same little search, which spares
a launch, and then some elements of all lanes' states. The second multiplies the states of all lanes
by the rows of [W_hh ; W1's state part], which are read once for all of them, before the states are
there. A path's chance never rises along it: once as many nodes as the tree has are as likely as a
depth's best lane, deeper ones have no place in it, and launches for these end as they begin.

Without states to carry, the head's part is a table of candidates by candidates (Markov) or nothing
(DFlash), and one launch does it all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.drafter.heads import DominoHead, Head, MarkovHead
from domino_spec.drafter.tree import LANES, DraftTree, grow, tree_nodes
from domino_spec.engine.kernels.gumbel import Noise
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.packing import Table, look_up, plain_rows
from domino_spec.engine.kernels.runtime import triton_available, usable

if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.gumbel import gumbel_of
    from domino_spec.engine.kernels.keys import pack, unpack_ids, unpack_scores
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

MAX_ROWS = 8
MAX_CANDIDATES = 64
TILE = 32
"""Rows of the weights that a program multiplies; half as many where they are wide."""
LEAST_TILE = 16
"""What tensor cores multiply at a time; wider states than leave room for it take PyTorch's path."""
MAX_TILE_BYTES = 1 << 16
"""Of these rows, which a program holds while it waits for the states."""
SLICE = 64
"""Elements of the states that a program computes."""
PARTS = 8
"""Stretches of the states that are multiplied independently: one sum would wait for each step."""


def grow_tree(
    head: Head | None,
    *,
    embedding: Table,  # [vocabulary, hidden]
    hidden: Tensor,  # [rows, depth, hidden]
    anchor_tokens: Tensor,  # [rows]
    base: Tensor,  # [rows, depth, candidates]
    columns: Tensor | None,  # [rows, depth, candidates]
    draft_tokens: Tensor | None,
    nodes: int,
    noise: Noise | None = None,
) -> DraftTree:
    """Trees of so many nodes; with noise children are those that are drawn first."""
    rows, _, count = base.shape
    if (
        columns is None
        or not usable(hidden)
        or plain_rows(embedding) is None
        or rows > MAX_ROWS
        or count > MAX_CANDIDATES
        or (head is not None and not isinstance(head, DominoHead | MarkovHead))
        or (isinstance(head, DominoHead) and not _tile(head))
    ):
        return grow_reference(
            head, embedding, hidden, anchor_tokens, base, columns, draft_tokens, nodes, noise
        )
    search = _Search(anchor_tokens, base, columns, draft_tokens, nodes, noise)
    if isinstance(head, DominoHead):
        search.carry_states(head, embedding, hidden)
    else:
        search.look_up(head)
    return search.tree


def grow_reference(
    head: Head | None,
    embedding: Table,
    hidden: Tensor,
    anchor_tokens: Tensor,
    base: Tensor,
    columns: Tensor | None,
    draft_tokens: Tensor | None,
    nodes: int,
    noise: Noise | None = None,
) -> DraftTree:
    """`drafter.tree.grow` itself, with the noise."""
    from domino_spec.engine.sampling import Draws

    draws, starts = Draws(), anchor_tokens
    if noise is not None:
        draws = Draws(temperature=noise.temperature, seeds=noise.seeds)
        starts = noise.positions - 1
    return grow(
        head,
        lambda read: look_up(embedding, read),
        hidden=hidden,
        anchor_tokens=anchor_tokens,
        base=base,
        columns=columns,
        draft_tokens=draft_tokens,
        nodes=nodes,
        scores=lambda index, logits, tokens: draws.tree_scores(index, logits, starts, tokens),
    )


def _tile(head: DominoHead) -> int:
    """Rows of the head's weights that a program multiplies; 0 where too few of them fit."""
    weight = head.output_weight
    rows = MAX_TILE_BYTES // (triton.next_power_of_2(head.state_size) * weight.element_size())
    return min(TILE, rows) if rows >= LEAST_TILE else 0


class _Search:
    """The lanes of all depths, and what the kernels share."""

    def __init__(
        self,
        anchors: Tensor,
        base: Tensor,
        columns: Tensor,
        draft_tokens: Tensor | None,
        nodes: int,
        noise: Noise | None,
    ) -> None:
        self.rows, self.depth, self.count = base.shape
        self.nodes = tree_nodes(nodes, self.depth, self.count)
        self.tokens = (columns if draft_tokens is None else draft_tokens[columns]).contiguous()
        self.columns, self.base = columns.contiguous(), base.contiguous()
        shape = (self.rows, self.depth, LANES)
        # Of each depth's lanes: the path's chance as a logarithm, the candidate, the parent's lane.
        self.chances = base.new_empty(shape, dtype=torch.float32)
        self.chosen = anchors.new_empty(shape, dtype=torch.int32)
        self.parents = torch.empty_like(self.chosen)
        self.ended: Tensor | None = None
        """Depths that were searched, where states were carried [rows]."""
        drawn = (None, None, None) if noise is None else noise
        self.lanes = (self.base, self.tokens, *drawn, self.chances, self.chosen, self.parents)
        self.shapes: dict[str, Any] = {
            "COUNT": self.count,
            "COUNT_PADDED": triton.next_power_of_2(self.count),
            "LANES": LANES,
            "NOISE": noise is not None,
        }
        places = torch.empty(4, self.rows, self.nodes + 1, dtype=torch.int64, device=base.device)
        size = self.nodes + 1
        paths = torch.empty(self.rows, size, size, dtype=torch.int64, device=base.device)
        tokens, parents, depths, ancestors = places.unbind(0)
        self.tree = DraftTree(tokens, parents, depths, ancestors, paths)
        self.anchors = anchors.contiguous()
        own = (tokens, parents, depths, ancestors, paths)
        self.out = (self.anchors, *own, self.depth, self.nodes)
        self.ends: dict[str, Any] = {
            "NODES_PADDED": triton.next_power_of_2(self.nodes + 1),
            "DEPTHS_PADDED": triton.next_power_of_2(self.depth),
            "ROUNDS": max(1, (self.depth - 1).bit_length()) + 1,
        }

    def carry_states(self, head: DominoHead, embedding: Table, hidden: Tensor) -> None:
        """The Domino head's search."""
        rows, depth, count = self.rows, self.depth, self.count
        size, rank, prefix = head.state_size, head.output_weight.shape[1], head.prefix_len
        weight_input, weight_state = head.prefix_gru.all_weights[0]
        weight_first = head.state_weight  # [rank, size], strided
        # Nodes of the last depth are not read; the anchor comes first.
        read = torch.cat((self.anchors.unsqueeze(1), self.tokens[:, :-1].flatten(1)), dim=1)
        inputs = F.linear(look_up(embedding, read), weight_input)  # [rows, read, 3 * size]
        projected = head.project_hidden(hidden).contiguous()  # [rows, depth, rank]
        tile, kind = _tile(head), weight_state.dtype
        tiles = -(-rank // tile)
        wide: dict[str, Any] = {"dtype": torch.float32, "device": hidden.device}
        states = torch.empty(rows, depth, LANES, size, **wide)
        rounded = torch.empty(rows, depth, LANES, size, dtype=kind, device=hidden.device)
        carried = torch.empty(rows, depth, LANES, 3 * size, **wide)
        scores = torch.empty(rows, depth, tiles, LANES, count, **wide)
        self.ended = torch.empty(rows, dtype=torch.int32, device=hidden.device)
        shapes = {
            **self.shapes,
            "TILES": tiles,
            "PREFIX": prefix,
        }
        together = overlap(hidden)
        state_tiles = -(-3 * size // tile)
        width = max(16, triton.next_power_of_2(size) // PARTS)
        parts = triton.next_power_of_2(triton.cdiv(size, width))
        for step in range(depth):
            _advance[(triton.cdiv(size, SLICE), rows)](
                *self.lanes, scores, inputs, states, rounded, carried, self.ended, step, depth,
                self.nodes, SIZE=size, SLICE=SLICE, DEPTHS_PADDED=self.ends["DEPTHS_PADDED"],
                num_warps=4, **shapes, **together,
            )  # fmt: skip
            # The last states carry nothing on, and the prefix needs no scores.
            first = 0 if step + 1 < depth else state_tiles
            stop = state_tiles + (tiles if step >= prefix else 0)
            if stop > first:
                _multiply[(stop - first, rows)](
                    weight_state, weight_first, weight_first.stride(0), head.output_weight,
                    projected, self.columns, rounded, carried, scores, self.ended, step, depth,
                    first, SIZE=size, RANK=rank, TILE=tile, PARTS=parts, WIDTH=width,
                    COUNT=count, COUNT_PADDED=shapes["COUNT_PADDED"], LANES=LANES, TILES=tiles,
                    num_warps=8, **together,
                )  # fmt: skip
        _finish[(rows,)](
            *self.lanes, scores, self.ended, *self.out, num_warps=8, **shapes, **self.ends,
            **together,
        )  # fmt: skip

    def look_up(self, head: MarkovHead | None) -> None:
        """The search where the head's part depends on the token before alone, or on nothing."""
        table = None
        prefix = self.depth
        if head is not None:
            prefix = head.prefix_len
            # For each depth what a candidate of the one before adds to each of its candidates.
            before = self.tokens.roll(1, dims=1)
            before[:, 0] = self.anchors.unsqueeze(1)
            table = head.output_weight[self.columns] @ head.markov_w1(before).transpose(2, 3)
            table = table.transpose(2, 3).float().contiguous()  # [rows, depth, before, candidates]
        _search[(self.rows,)](
            *self.lanes, table, *self.out, PREFIX=prefix, num_warps=4, **self.shapes, **self.ends,
            **overlap(self.base),
        )  # fmt: skip


if triton_available():

    @triton.jit
    def _children(
        logits,  # [LANES, COUNT_PADDED]: the head's part
        chances,  # [LANES]: of the lanes that they follow
        row,
        step,
        depth,
        base,
        tokens,
        temperature,
        seeds,
        positions,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        NOISE: tl.constexpr,
    ):
        """The lanes of depth `step`: (chance, candidate, parent's lane), all [LANES]."""
        candidate = tl.arange(0, COUNT_PADDED)
        inside = candidate < COUNT
        place = (row * depth + step) * COUNT + candidate
        logits += tl.load(base + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        if NOISE:
            ids = tl.load(tokens + place, mask=inside, other=0)
            heat = tl.load(temperature + row)
            noise = gumbel_of(tl.load(seeds + row), tl.load(positions + row) + step, ids)
            warm = heat > 0
            logits = tl.where(warm, logits / tl.where(warm, heat, 1.0) + noise[None, :], logits)
        logits = tl.where(inside[None, :], logits, float("-inf"))
        logits -= tl.max(logits, axis=1)[:, None]
        paths = logits - tl.log(tl.sum(tl.exp(logits), axis=1))[:, None]
        # What is not a number has an order too, and never stands for a place that is not there.
        paths = tl.where(paths == paths, paths, -1e30) + chances[:, None]

        # The best of them all; no two keys are equal.
        lane = tl.arange(0, LANES)
        keys = pack(paths, lane[:, None] * COUNT_PADDED + candidate[None, :])
        keys = tl.where(inside[None, :], keys, -(2**63))
        best = tl.topk(tl.reshape(keys, [LANES * COUNT_PADDED]), LANES)
        place = unpack_ids(best).to(tl.int32)
        return unpack_scores(best), place % COUNT_PADDED, place // COUNT_PADDED

    @triton.jit
    def _known(row, step, depth, chances, LANES: tl.constexpr):
        """Chances of the lanes before `step`: at first the anchor's alone."""
        lane = tl.arange(0, LANES)
        known = tl.load(chances + (row * depth + step - 1) * LANES + lane, mask=step > 0, other=0.0)
        return tl.where((step > 0) | (lane == 0), known, float("-inf"))

    @triton.jit
    def _scored(
        row,
        step,
        depth,
        base,
        tokens,
        temperature,
        seeds,
        positions,
        chances,
        scores,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        NOISE: tl.constexpr,
        TILES: tl.constexpr,
        PREFIX: tl.constexpr,
    ):
        """`_children` of depth `step` from the parts of its scores."""
        lane, candidate = tl.arange(0, LANES), tl.arange(0, COUNT_PADDED)
        logits = tl.zeros([LANES, COUNT_PADDED], tl.float32)
        there = (candidate < COUNT)[None, :] & (lane >= 0)[:, None] & (step >= PREFIX)
        for tile in tl.static_range(TILES):
            part = scores + ((row * depth + step) * TILES + tile) * LANES * COUNT
            logits += tl.load(
                part + lane[:, None] * COUNT + candidate[None, :], mask=there, other=0.0
            )
        known = _known(row, step, depth, chances, LANES)
        return _children(
            logits, known, row, step, depth, base, tokens, temperature, seeds, positions,
            COUNT, COUNT_PADDED, LANES, NOISE,
        )  # fmt: skip

    @triton.jit
    def _keep(
        row, step, depth, chance, chosen, parent, chances, every, parents, LANES: tl.constexpr
    ):
        place = (row * depth + step) * LANES + tl.arange(0, LANES)
        tl.store(chances + place, chance)
        tl.store(every + place, chosen)
        tl.store(parents + place, parent)

    @triton.jit
    def _enough(
        row, step, depth, nodes, chance, chances, LANES: tl.constexpr, DEPTHS_PADDED: tl.constexpr
    ):
        """Whether no node deeper than the lanes of depth `step` has a place in the tree."""
        entry = tl.arange(0, DEPTHS_PADDED * LANES)
        before = tl.load(
            chances + row * depth * LANES + entry, mask=entry < step * LANES, other=float("-inf")
        )
        best = tl.max(chance, axis=0)
        ahead = tl.sum((before >= best).to(tl.int32), axis=0)
        return ahead + tl.sum((chance >= best).to(tl.int32), axis=0) >= nodes

    @triton.jit
    def _gate(inputs, carried):
        return tl.sigmoid(inputs.to(tl.float32) + carried)

    @triton.jit(do_not_specialize=["step", "depth", "nodes"])
    def _advance(
        base,
        tokens,
        temperature,
        seeds,
        positions,
        chances,
        every,
        parents,
        scores,
        inputs,
        states,
        rounded,
        carried,
        ended,
        step,
        depth,
        nodes,
        SIZE: tl.constexpr,
        SLICE: tl.constexpr,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        DEPTHS_PADDED: tl.constexpr,
        NOISE: tl.constexpr,
        TILES: tl.constexpr,
        PREFIX: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Lanes of depth step - 1, and some elements of the states after reading them."""
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        program, row = tl.program_id(0), tl.program_id(1)
        last = tl.load(ended + row, mask=step > 0, other=0)
        if last < step:
            return
        lane = tl.arange(0, LANES)
        own = program * SLICE + tl.arange(0, SLICE)
        within = (own < SIZE)[None, :]
        read = row * (1 + (depth - 1) * COUNT) + lane * 0
        parent = lane * 0
        enough = False
        if step > 0:
            chance, chosen, parent = _scored(
                row, step - 1, depth, base, tokens, temperature, seeds, positions, chances, scores,
                COUNT, COUNT_PADDED, LANES, NOISE, TILES, PREFIX,
            )  # fmt: skip
            if program == 0:
                _keep(row, step - 1, depth, chance, chosen, parent, chances, every, parents, LANES)
            read += 1 + (step - 1) * COUNT + chosen
            enough = _enough(row, step - 1, depth, nodes, chance, chances, LANES, DEPTHS_PADDED)
        if program == 0:
            tl.store(ended + row, tl.where(enough, step, depth))
        if enough:
            return
        going = within & (step > 0)
        before = ((row * depth + step - 1) * LANES + parent)[:, None]
        old = tl.load(states + before * SIZE + own[None, :], mask=going, other=0.0)
        from_old = carried + before * 3 * SIZE + own[None, :]
        given = inputs + read[:, None] * 3 * SIZE + own[None, :]
        reset = _gate(
            tl.load(given, mask=within, other=0.0), tl.load(from_old, mask=going, other=0.0)
        )
        update = _gate(
            tl.load(given + SIZE, mask=within, other=0.0),
            tl.load(from_old + SIZE, mask=going, other=0.0),
        )
        new = tl.load(given + 2 * SIZE, mask=within, other=0.0).to(tl.float32)
        new += reset * tl.load(from_old + 2 * SIZE, mask=going, other=0.0)
        new = 2.0 * tl.sigmoid(2.0 * new) - 1.0  # tanh
        state = new + update * (old - new)
        place = ((row * depth + step) * LANES + lane)[:, None] * SIZE + own[None, :]
        tl.store(states + place, state, mask=within)
        tl.store(rounded + place, state.to(rounded.dtype.element_ty), mask=within)

    @triton.jit(do_not_specialize=["step", "depth", "first"])
    def _multiply(
        weight_state,
        weight_first,
        first_stride,
        weight_output,
        projected,
        columns,
        rounded,
        carried,
        scores,
        ended,
        step,
        depth,
        first,
        SIZE: tl.constexpr,
        RANK: tl.constexpr,
        TILE: tl.constexpr,
        PARTS: tl.constexpr,
        WIDTH: tl.constexpr,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        TILES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """A tile of the weights' rows times the states of all lanes."""
        let_next_come(OVERLAP)
        program, row = tl.program_id(0), tl.program_id(1)
        slot = row * depth + step
        lane = tl.arange(0, LANES)

        # The weights wait for nothing, so they are asked for first.
        state_tiles: tl.constexpr = (3 * SIZE + TILE - 1) // TILE
        rank_tile = program + first - state_tiles
        ranks = rank_tile >= 0
        own = tl.where(ranks, rank_tile, program + first) * TILE + tl.arange(0, TILE)
        there = own < tl.where(ranks, RANK, 3 * SIZE)
        source = tl.where(ranks, weight_first, weight_state)
        source += own * tl.where(ranks, first_stride, SIZE)
        element = tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        within = element < SIZE
        weight = tl.load(
            source[None, :, None] + element[:, None, :],
            mask=there[None, :, None] & within[:, None, :],
            other=0.0,
        )  # [PARTS, TILE, WIDTH]
        wait_for_last(OVERLAP)
        last = tl.load(ended + row)
        candidate = tl.arange(0, COUNT_PADDED)
        scored = (candidate < COUNT) & ranks
        column = tl.load(columns + slot * COUNT + candidate, mask=scored, other=0)
        part = tl.load(projected + slot * RANK + own, mask=there & ranks, other=0.0).to(tl.float32)
        state = tl.load(
            rounded + (slot * LANES + lane)[None, None, :] * SIZE + element[:, :, None],
            mask=within[:, :, None],
            other=0.0,
        )  # [PARTS, WIDTH, LANES]
        if last <= step:
            return
        output = tl.load(
            weight_output + column[:, None] * RANK + own[None, :],
            mask=scored[:, None] & (own < RANK)[None, :],
            other=0.0,
        )  # [COUNT, TILE]
        product = tl.sum(tl.dot(weight, state, input_precision="ieee"), axis=0)  # [TILE, LANES]
        if ranks:
            product += part[:, None]
            product *= tl.sigmoid(product)
            added = tl.dot(output, product.to(output.dtype), input_precision="ieee")
            part_place = (slot * TILES + rank_tile) * LANES + lane
            tl.store(
                scores + part_place[None, :] * COUNT + candidate[:, None],
                added,
                mask=scored[:, None],
            )
        else:
            place = (slot * LANES + lane)[None, :] * 3 * SIZE + own[:, None]
            tl.store(carried + place, product, mask=there[:, None])

    @triton.jit
    def _select(
        row,
        tokens,
        chances,
        every,
        parents,
        anchors,
        tree_tokens,
        tree_parents,
        tree_depths,
        tree_ancestors,
        tree_paths,
        depth,
        used,
        nodes,
        COUNT: tl.constexpr,
        LANES: tl.constexpr,
        NODES_PADDED: tl.constexpr,
        DEPTHS_PADDED: tl.constexpr,
        ROUNDS: tl.constexpr,
    ):
        """The best of the lanes of the first `used` depths, as a tree."""
        EVERY: tl.constexpr = DEPTHS_PADDED * LANES
        CHECKED: tl.constexpr = 16
        entry = tl.arange(0, EVERY)
        deep = entry // LANES
        there = deep < used
        lanes = row * depth * LANES + entry
        chance = tl.load(chances + lanes, mask=there, other=float("-inf"))
        rank = entry * 0
        for at in range(0, EVERY, CHECKED):
            other = at + tl.arange(0, CHECKED)
            against = tl.load(
                chances + row * depth * LANES + other, mask=other < used * LANES,
                other=float("-inf"),
            )  # fmt: skip
            ahead = (against[None, :] > chance[:, None]) | (
                (against[None, :] == chance[:, None]) & (other[None, :] < entry[:, None])
            )
            rank += tl.sum((ahead & (other < EVERY)[None, :]).to(tl.int32), axis=1)
        kept = there & (rank < nodes)
        which = tl.load(every + lanes, mask=there, other=0)
        above = tl.load(parents + lanes, mask=there, other=0) + (deep - 1) * LANES
        token = tl.load(tokens + (row * depth + deep) * COUNT + which, mask=there, other=0)
        parent = tl.gather(rank, tl.maximum(above, 0), axis=0) + 1
        parent = tl.where(deep == 0, 0, parent)
        place = row * (nodes + 1) + 1 + rank
        tl.store(tree_tokens + place, token, mask=kept)
        tl.store(tree_parents + place, parent.to(tl.int64), mask=kept)
        tl.store(tree_depths + place, (deep + 1).to(tl.int64), mask=kept)
        tl.store(tree_tokens + row * (nodes + 1), tl.load(anchors + row))
        tl.store(tree_parents + row * (nodes + 1), tl.full([], 0, tl.int64))
        tl.store(tree_depths + row * (nodes + 1), tl.full([], 0, tl.int64))
        tl.debug_barrier()  # what other threads have written
        node = tl.arange(0, NODES_PADDED)
        inside = node <= nodes
        up = tl.load(tree_parents + row * (nodes + 1) + node, mask=inside, other=0).to(tl.int32)
        one = tl.full([NODES_PADDED], 1, tl.int64)
        bits = (one << node.to(tl.int64)) | (one << up.to(tl.int64))
        for _ in tl.static_range(ROUNDS):
            bits |= tl.gather(bits, up, axis=0)
            up = tl.gather(up, up, axis=0)
        tl.store(tree_ancestors + row * (nodes + 1) + node, bits, mask=inside)
        # Each ancestor at its depth; what is deeper than the node is not read.
        down = tl.load(tree_depths + row * (nodes + 1) + node, mask=inside, other=0)
        place = (row * (nodes + 1) + node)[:, None] * (nodes + 1) + down[None, :]
        there = ((bits[:, None] >> node[None, :].to(tl.int64)) & 1) != 0
        there = there & inside[:, None] & inside[None, :]
        tl.store(tree_paths + place, node[None, :].to(tl.int64) + place * 0, mask=there)

    @triton.jit(do_not_specialize=["depth", "nodes"])
    def _finish(
        base,
        tokens,
        temperature,
        seeds,
        positions,
        chances,
        every,
        parents,
        scores,
        ended,
        anchors,
        tree_tokens,
        tree_parents,
        tree_depths,
        tree_ancestors,
        tree_paths,
        depth,
        nodes,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        NOISE: tl.constexpr,
        TILES: tl.constexpr,
        PREFIX: tl.constexpr,
        NODES_PADDED: tl.constexpr,
        DEPTHS_PADDED: tl.constexpr,
        ROUNDS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """The lanes of the last depth, then the tree."""
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        used = tl.load(ended + row)
        if used == depth:
            chance, chosen, parent = _scored(
                row, depth - 1, depth, base, tokens, temperature, seeds, positions, chances,
                scores, COUNT, COUNT_PADDED, LANES, NOISE, TILES, PREFIX,
            )  # fmt: skip
            _keep(row, depth - 1, depth, chance, chosen, parent, chances, every, parents, LANES)
        tl.debug_barrier()
        _select(
            row, tokens, chances, every, parents, anchors, tree_tokens, tree_parents, tree_depths,
            tree_ancestors, tree_paths, depth, used, nodes,
            COUNT, LANES, NODES_PADDED, DEPTHS_PADDED, ROUNDS,
        )  # fmt: skip

    @triton.jit(do_not_specialize=["depth", "nodes"])
    def _search(
        base,
        tokens,
        temperature,
        seeds,
        positions,
        chances,
        every,
        parents,
        table,  # [rows, depth, COUNT, COUNT], or None
        anchors,
        tree_tokens,
        tree_parents,
        tree_depths,
        tree_ancestors,
        tree_paths,
        depth,
        nodes,
        COUNT: tl.constexpr,
        COUNT_PADDED: tl.constexpr,
        LANES: tl.constexpr,
        NOISE: tl.constexpr,
        PREFIX: tl.constexpr,
        NODES_PADDED: tl.constexpr,
        DEPTHS_PADDED: tl.constexpr,
        ROUNDS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """All depths of one row, then its tree."""
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        lane, candidate = tl.arange(0, LANES), tl.arange(0, COUNT_PADDED)
        chance = tl.where(lane == 0, 0.0, float("-inf"))
        chosen = lane * 0
        for step in range(0, depth):
            logits = tl.zeros([LANES, COUNT_PADDED], tl.float32)
            if table is not None:
                place = ((row * depth + step) * COUNT + chosen)[:, None] * COUNT
                logits = tl.load(
                    table + place + candidate[None, :],
                    mask=(candidate < COUNT)[None, :] & (step >= PREFIX),
                    other=0.0,
                )
            chance, chosen, parent = _children(
                logits, chance, row, step, depth, base, tokens, temperature, seeds, positions,
                COUNT, COUNT_PADDED, LANES, NOISE,
            )  # fmt: skip
            _keep(row, step, depth, chance, chosen, parent, chances, every, parents, LANES)
        tl.debug_barrier()
        _select(
            row, tokens, chances, every, parents, anchors, tree_tokens, tree_parents, tree_depths,
            tree_ancestors, tree_paths, depth, depth, nodes,
            COUNT, LANES, NODES_PADDED, DEPTHS_PADDED, ROUNDS,
        )  # fmt: skip
