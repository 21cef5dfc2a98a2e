"""Keys and values of a tree's accepted drafts, moved to where the next tokens will expect them."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.paging import paging
from domino_spec.engine.kernels.runtime import on_host, triton_available, usable

if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last
    from domino_spec.engine.kernels.paging import page_of


def compact(
    states: Tensor,  # [layers, 2, pages, kv heads, tokens a page, head_dim]
    pages: Tensor,  # [rows, pages a row]
    starts: Tensor,  # [rows]
    path: Tensor,  # [rows, n]: place starts + path[:, j] goes to starts + j; never to a later one
) -> None:
    """All layers' keys and values at once, in place."""
    if not usable(states):
        compact_reference(states, pages, starts, path)
        return
    layers, two, _, heads, page, head_dim = states.shape
    rows, n = path.shape
    _compact[(layers * two, heads, rows)](
        states,
        pages,
        starts,
        path.contiguous(),
        n,
        pages.shape[1] * page,
        pages.shape[1],
        states.stride(1),
        states.stride(2),
        states.stride(3),
        N_PADDED=triton.next_power_of_2(n),
        HEAD_DIM=head_dim,
        LANES=triton.next_power_of_2(head_dim),
        num_warps=4,
        **overlap(states),
        **paging(pages, states),
    )


def compact_reference(states: Tensor, pages: Tensor, starts: Tensor, path: Tensor) -> None:
    """What `compact` does."""
    steps = torch.arange(path.shape[1], device=path.device).expand_as(path)
    if on_host(states) and torch.equal(path, steps):
        return  # a chain
    # Sequences that only fill up a batch may lie at the end of their slot.
    page = states.shape[4]
    last = pages.shape[1] * page - 1
    found, wanted = ((starts.unsqueeze(1) + each).clamp(max=last) for each in (path, steps))
    source, goal = ((pages.gather(1, each // page).long(), each % page) for each in (found, wanted))
    moved = states.permute(2, 4, 0, 1, 3, 5)  # [pages, tokens a page, ...]
    moved[goal] = moved[source]  # read whole before written


if triton_available():

    @triton.jit(do_not_specialize=["n", "capacity", "row_pages"])
    def _compact(
        states,
        pages,  # [rows, row_pages]
        starts,
        path,
        n,
        capacity,
        row_pages,
        part_stride,
        page_stride,
        head_stride,
        N_PADDED: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        LANES: tl.constexpr,
        OVERLAP: tl.constexpr,
        PAGE: tl.constexpr,
    ):
        """One program for one layer's keys or values of one head of one row."""
        wait_for_last(OVERLAP)
        part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        start = tl.load(starts + row)
        step = tl.arange(0, N_PADDED)
        found = tl.load(path + row * n + step, mask=step < n, other=0)
        lane = tl.arange(0, LANES)
        moves = (found != step) & (step < n) & (start + step < capacity)
        moves = moves & (start + found < capacity)
        inside = moves[:, None] & (lane < HEAD_DIM)[None, :]
        own = part.to(tl.int64) * part_stride + head * head_stride + lane[None, :]
        pages += row * row_pages
        page, spot = page_of(pages, start + found, moves, PAGE)
        source = page * page_stride + spot * HEAD_DIM
        page, spot = page_of(pages, start + step, moves, PAGE)
        goal = page * page_stride + spot * HEAD_DIM
        values = tl.load(states + own + source[:, None], mask=inside, other=0.0)
        tl.debug_barrier()  # what is written may be what another thread reads
        tl.store(states + own + goal[:, None], values, mask=inside)
        let_next_come(OVERLAP)
