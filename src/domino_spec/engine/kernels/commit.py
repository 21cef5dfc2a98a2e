"""The end of a cycle: how many drafts are what the target chose, and what each slot holds now."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.drafter.tree import DraftTree
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable

_WARP = 32
"""Blocks up to so many tokens take one step of one warp, and share one compiled kernel."""


def commit(
    chosen: Tensor,  # [rows, n]: what the target chose after each token of the block
    block: Tensor,  # [rows, n]: the anchor and the drafts
    slots: Tensor,  # [rows]
    lengths: Tensor,  # [slots + 1]; the last one, the spare slot's, stays 0
    anchors: Tensor,  # [slots + 1]
    told: Tensor | None = None,  # [rows]: accepted drafts, if they are not to be counted
    reach: Tensor | None = None,  # [rows]: drafts that can be accepted, where not all can
) -> tuple[Tensor, Tensor]:  # [rows, n + 1], [rows]
    """For each row how many drafts were accepted, then what was chosen; and the former alone.

    Slots advance by the accepted drafts and the anchor before them.
    """
    if not usable(chosen):
        return commit_reference(chosen, block, slots, lengths, anchors, told, reach)
    rows, n = chosen.shape
    report = chosen.new_empty(rows, n + 1)
    _commit[(rows,)](
        chosen,
        block.contiguous(),
        slots,
        lengths,
        anchors,
        chosen if told is None else told,
        reach,
        0 if reach is None else reach.stride(0),
        report,
        n,
        len(lengths) - 1,
        TOLD=told is not None,
        PADDED=max(_WARP, triton.next_power_of_2(n)),
        num_warps=1,
        **overlap(chosen),
    )
    return report, report[:, 0]


def commit_reference(
    chosen: Tensor,
    block: Tensor,
    slots: Tensor,
    lengths: Tensor,
    anchors: Tensor,
    told: Tensor | None = None,
    reach: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `commit` does."""
    accepted = told
    if accepted is None:
        accepted = (chosen[:, :-1] == block[:, 1:]).cumprod(dim=1).sum(dim=1)
        accepted = accepted if reach is None else accepted.minimum(reach)
    counted = accepted.unsqueeze(1)
    lengths.index_add_(0, slots, accepted + 1)
    anchors.index_copy_(0, slots, chosen.gather(1, counted).squeeze(1))
    lengths[-1:].zero_()
    return torch.cat((counted, chosen), dim=1), accepted


def commit_tree(
    chosen: Tensor,  # [rows, n]: what the target chose after each node
    tree: DraftTree,
    slots: Tensor,  # [rows]
    lengths: Tensor,  # [slots + 1]; the last one, the spare slot's, stays 0
    anchors: Tensor,  # [slots + 1]
    depth: int,
    told: Tensor | None = None,  # [rows]: accepted nodes as bits, if they are not to be found
) -> tuple[Tensor, Tensor]:  # [rows, 1 + places + depth + 2 * n], [rows, places]
    """For each row what its walk through a verified tree gives.

    A report: how many drafts were accepted; what was chosen after the anchor and each of them, at
    depth + 1 places; their nodes, at `depth` places; the tree's tokens and parents. And the path:
    nodes from the anchor on, after the last accepted one places that stay where they are.
    """
    if not usable(chosen):
        return commit_tree_reference(chosen, tree, slots, lengths, anchors, depth, told)
    rows, n = chosen.shape
    report = chosen.new_empty(rows, 2 + 2 * depth + 2 * n)
    path = chosen.new_empty(rows, depth + 1)
    _commit_tree[(rows,)](
        chosen.contiguous(),
        tree.tokens.contiguous(),
        tree.parents.contiguous(),
        tree.depths.contiguous(),
        tree.ancestors.contiguous(),
        slots,
        lengths,
        anchors,
        chosen if told is None else told,
        report,
        path,
        n,
        depth,
        len(lengths) - 1,
        TOLD=told is not None,
        PADDED=triton.next_power_of_2(n),
        PLACES=triton.next_power_of_2(depth + 1),
        num_warps=4,
        **overlap(chosen),
    )
    return report, path


def commit_tree_reference(
    chosen: Tensor,
    tree: DraftTree,
    slots: Tensor,
    lengths: Tensor,
    anchors: Tensor,
    depth: int,
    told: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `commit_tree` does."""
    places = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    if told is None:
        agree = (tree.tokens == chosen.gather(1, tree.parents)) | (places == 0)
        told = (agree.long() << places).sum(dim=1)
    # A node is accepted if it and all before it are what was chosen there: one path.
    kept = (tree.ancestors & ~told.unsqueeze(1)) == 0
    accepted = kept.sum(dim=1) - 1
    steps = torch.arange(depth + 1, device=chosen.device).expand(len(chosen), -1)
    nodes = torch.zeros(len(chosen), depth + 2, dtype=torch.long, device=chosen.device)
    nodes.scatter_(1, torch.where(kept, tree.depths, depth + 1), places)
    path = torch.where(steps <= accepted.unsqueeze(1), nodes[:, :-1], steps)
    along = chosen.gather(1, path.clamp(max=chosen.shape[1] - 1))
    lengths[slots] += accepted + 1
    anchors[slots] = along.gather(1, accepted.unsqueeze(1)).squeeze(1)
    lengths[-1:].zero_()
    report = (accepted.unsqueeze(1), along, path[:, 1:], tree.tokens, tree.parents)
    return torch.cat(report, dim=1), path


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit(do_not_specialize=["reach_stride", "n", "spare"])
    def _commit(
        chosen,
        block,
        slots,
        lengths,
        anchors,
        told,
        reach,  # [rows], or None
        reach_stride,
        report,
        n,
        spare,
        TOLD: tl.constexpr,
        PADDED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one row."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row = tl.program_id(0)
        place = tl.arange(0, PADDED)
        tokens = tl.load(chosen + row * n + place, mask=place < n, other=0)
        if TOLD:
            accepted = tl.load(told + row)
        else:
            drafts = tl.load(block + row * n + place + 1, mask=place < n - 1, other=0)
            # The first place that does not agree; the last one has no draft.
            end = n - 1
            if reach is not None:
                end = tl.load(reach + row * reach_stride).to(tl.int32)
            refused = (tokens != drafts) | (place >= end)
            accepted = tl.min(tl.where(refused, place, PADDED), axis=0).to(tl.int64)
        tl.store(report + row * (n + 1), accepted)
        tl.store(report + row * (n + 1) + 1 + place, tokens, mask=place < n)
        slot = tl.load(slots + row)
        length = tl.load(lengths + slot) + accepted + 1
        tl.store(lengths + slot, tl.where(slot == spare, 0, length))
        tl.store(anchors + slot, tl.sum(tl.where(place == accepted, tokens, 0), axis=0))

    @triton.jit(do_not_specialize=["n", "depth", "spare"])
    def _commit_tree(
        chosen,
        tokens,
        parents,
        depths,
        ancestors,
        slots,
        lengths,
        anchors,
        told,
        report,
        path,
        n,
        depth,
        spare,
        TOLD: tl.constexpr,
        PADDED: tl.constexpr,
        PLACES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one row."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row = tl.program_id(0)
        node = tl.arange(0, PADDED)
        there = node < n
        own = row * n + node
        token = tl.load(tokens + own, mask=there, other=0)
        parent = tl.load(parents + own, mask=there, other=0)
        if TOLD:
            good = tl.load(told + row)
        else:
            after = tl.load(chosen + row * n + parent, mask=there, other=0)
            agree = ((token == after) | (node == 0)) & there
            good = tl.sum(tl.where(agree, 1, 0).to(tl.int64) << node.to(tl.int64), axis=0)
        above = tl.load(ancestors + own, mask=there, other=0)
        kept = ((above & ~good) == 0) & there
        accepted = tl.sum(tl.where(kept, 1, 0), axis=0) - 1

        step = tl.arange(0, PLACES)
        deep = tl.load(depths + own, mask=there, other=0)
        on_path = kept[:, None] & (deep[:, None] == step[None, :])
        nodes = tl.sum(tl.where(on_path, node[:, None], 0), axis=0)
        nodes = tl.where(step <= accepted, nodes, step)
        # After the last accepted node any token will do: it is not committed.
        along = tl.load(chosen + row * n + tl.minimum(nodes, n - 1), mask=step <= depth, other=0)
        tl.store(path + row * (depth + 1) + step, nodes.to(tl.int64), mask=step <= depth)
        out = report + row * (2 + 2 * depth + 2 * n)
        tl.store(out, accepted.to(tl.int64))
        tl.store(out + 1 + step, along, mask=step <= depth)
        between = (step > 0) & (step <= depth)
        tl.store(out + 1 + depth + step, nodes.to(tl.int64), mask=between)
        tl.store(out + 2 + 2 * depth + node, token, mask=there)
        tl.store(out + 2 + 2 * depth + n + node, parent, mask=there)
        slot = tl.load(slots + row)
        length = tl.load(lengths + slot) + accepted + 1
        tl.store(lengths + slot, tl.where(slot == spare, 0, length))
        tl.store(anchors + slot, tl.sum(tl.where(step == accepted, along, 0), axis=0))
