"""Keys and values of a tree's accepted drafts, moved to where the next tokens will expect them."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import on_host, triton_available, usable

if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last


def compact(
    states: Tensor,  # [layers, 2, slots, kv heads, capacity, head_dim]
    slots: Tensor,  # [rows]
    starts: Tensor,  # [rows]
    path: Tensor,  # [rows, n]: place starts + path[:, j] goes to starts + j; never to a later one
) -> None:
    """All layers' keys and values at once, in place."""
    if not usable(states):
        compact_reference(states, slots, starts, path)
        return
    layers, two, _, heads, capacity, head_dim = states.shape
    rows, n = path.shape
    _compact[(layers * two, heads, rows)](
        states,
        slots,
        starts,
        path.contiguous(),
        n,
        capacity,
        states.stride(1),
        states.stride(2),
        states.stride(3),
        N_PADDED=triton.next_power_of_2(n),
        HEAD_DIM=head_dim,
        LANES=triton.next_power_of_2(head_dim),
        num_warps=4,
        **overlap(states),
    )


def compact_reference(states: Tensor, slots: Tensor, starts: Tensor, path: Tensor) -> None:
    """What `compact` does."""
    steps = torch.arange(path.shape[1], device=path.device).expand_as(path)
    if on_host(states) and torch.equal(path, steps):
        return  # a chain
    # Sequences that only fill up a batch may lie at the end of their slot.
    found, wanted = (
        (starts.unsqueeze(1) + each).clamp(max=states.shape[4] - 1) for each in (path, steps)
    )
    own = slots.unsqueeze(1)
    moved = states.permute(2, 4, 0, 1, 3, 5)  # [slots, capacity, ...]
    moved[own, wanted] = moved[own, found]  # read whole before written


if triton_available():

    @triton.jit(do_not_specialize=["n", "capacity"])
    def _compact(
        states,
        slots,
        starts,
        path,
        n,
        capacity,
        part_stride,
        slot_stride,
        head_stride,
        N_PADDED: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        LANES: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one layer's keys or values of one head of one row."""
        wait_for_last(OVERLAP)
        part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        start = tl.load(starts + row)
        step = tl.arange(0, N_PADDED)
        found = tl.load(path + row * n + step, mask=step < n, other=0)
        lane = tl.arange(0, LANES)
        moves = (found != step) & (step < n) & (start + step < capacity)
        inside = (moves & (start + found < capacity))[:, None] & (lane < HEAD_DIM)[None, :]
        own = tl.load(slots + row) * slot_stride + head * head_stride
        own += part.to(tl.int64) * part_stride + lane[None, :]
        values = tl.load(states + own + (start + found)[:, None] * HEAD_DIM, mask=inside, other=0.0)
        tl.debug_barrier()  # what is written may be what another thread reads
        tl.store(states + own + (start + step)[:, None] * HEAD_DIM, values, mask=inside)
        let_next_come(OVERLAP)
