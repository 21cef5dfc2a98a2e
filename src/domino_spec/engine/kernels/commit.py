"""The end of a cycle: how many drafts are what the target chose, and what each slot holds now."""

from __future__ import annotations

from torch import Tensor

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
) -> tuple[Tensor, Tensor]:  # [rows, n + 1], [rows]
    """For each row how many drafts were accepted, then what was chosen; and the former alone.

    Slots advance by the accepted drafts and the anchor before them.
    """
    if not usable(chosen):
        return commit_reference(chosen, block, slots, lengths, anchors, told)
    rows, n = chosen.shape
    report = chosen.new_empty(rows, n + 1)
    _commit[(rows,)](
        chosen,
        block.contiguous(),
        slots,
        lengths,
        anchors,
        chosen if told is None else told,
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
) -> tuple[Tensor, Tensor]:
    """What `commit` does."""
    accepted = told
    if accepted is None:
        accepted = (chosen[:, :-1] == block[:, 1:]).long().cumprod(dim=1).sum(dim=1)
    lengths[slots] += accepted + 1
    anchors[slots] = chosen.gather(1, accepted.unsqueeze(1)).squeeze(1)
    lengths[-1:].zero_()
    report = chosen.new_empty(chosen.shape[0], chosen.shape[1] + 1)
    report[:, 0], report[:, 1:] = accepted, chosen
    return report, accepted


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit(do_not_specialize=["n", "spare"])
    def _commit(
        chosen,
        block,
        slots,
        lengths,
        anchors,
        told,
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
            refused = (tokens != drafts) | (place >= n - 1)
            accepted = tl.min(tl.where(refused, place, PADDED), axis=0).to(tl.int64)
        tl.store(report + row * (n + 1), accepted)
        tl.store(report + row * (n + 1) + 1 + place, tokens, mask=place < n)
        slot = tl.load(slots + row)
        length = tl.load(lengths + slot) + accepted + 1
        tl.store(lengths + slot, tl.where(slot == spare, 0, length))
        tl.store(anchors + slot, tl.sum(tl.where(place == accepted, tokens, 0), axis=0))
