"""The best few tokens of each row.

Sorting is what costs, so little is sorted. A row is cut into small groups of tokens. The best few
tokens of a row lie in as many groups: those whose highest logits are best. Each program finds the
best groups of a part of the row; the last one of a row to finish sorts these, then what is in the
best of them.

What is sorted are keys: a score's bits, so that they order as scores do, then a place, so that no
two are equal and the first of equal scores is best. Half-precision scores leave room for a place
in 32 bits, at half the cost: as float32 their last 13 bits and more say nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.keys import pack_reference, unpack_reference
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable
from domino_spec.engine.kernels.scratch import scratch

MOST_CANDIDATES = 32
CHUNK = 8192
"""Tokens a program looks at."""
GROUP = 32
"""Tokens of a group; twice as many where there would be too many groups."""
MOST_GROUPS = 8192
"""Places that a key of 32 bits has room for."""


def top_candidates(
    logits: Tensor,  # [rows, V]
    k: int,
) -> tuple[Tensor, Tensor]:  # both [rows, k]
    """The k largest logits of each row, in logits' dtype, and their ids, int64.

    Largest first; of equal ones the lowest id first. What is not a number has no place.
    """
    taken = k <= MOST_CANDIDATES and len(logits) and logits.shape[1] <= MOST_GROUPS * 2 * GROUP
    if not taken or not usable(logits):
        return top_candidates_reference(logits, k)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"{k} candidates of {vocabulary} tokens")
    kept = max(2, triton.next_power_of_2(k))
    group = GROUP if vocabulary <= MOST_GROUPS * GROUP else 2 * GROUP
    assert kept <= CHUNK // group
    chunks = triton.cdiv(vocabulary, CHUNK)
    parts, arrivals = scratch(
        logits.device,
        parts=rows * chunks * kept,
        counters=rows,
        dtype=torch.int64 if logits.element_size() > 2 else torch.int32,
    )
    values = logits.new_empty(rows, k)
    ids = torch.empty(rows, k, device=logits.device, dtype=torch.int64)
    _top_kernel[(rows, chunks)](
        logits,
        values,
        ids,
        parts,
        arrivals,
        logits.stride(0),
        vocabulary,
        k,
        CHUNK=CHUNK,
        KEPT=kept,
        CHUNKS=chunks,
        GROUP=group,
        num_warps=8,
        **overlap(logits),
    )
    return values, ids


def top_candidates_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `top_candidates` computes."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = pack_reference(logits, ids).topk(k, dim=1).values
    values, ids = unpack_reference(best)
    return values.to(logits.dtype), ids


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.keys import order
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _keys(scores, inside, place, LAST: tl.constexpr):
        """No two alike; of what is outside, below all others."""
        ordered = order(scores.to(tl.float32))
        if scores.dtype.primitive_bitwidth > 16:
            return tl.where(inside, ordered.to(tl.int64) << 32, -(2**63)) | (LAST - place)
        else:  # noqa: RET505 - Triton must not look at both
            return tl.where(inside, ordered & ~LAST, -(2**31)) | (LAST - place)

    @triton.jit(do_not_specialize=["k"])
    def _top_kernel(
        logits,
        values,  # [rows, k]
        ids,  # [rows, k]
        parts,  # [rows, CHUNKS, KEPT]: keys of the best groups
        arrivals,  # [rows]
        stride,
        vocabulary,
        k,
        CHUNK: tl.constexpr,
        KEPT: tl.constexpr,
        CHUNKS: tl.constexpr,
        GROUP: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        chunk = tl.program_id(1)
        logits += row.to(tl.int64) * stride
        OWN: tl.constexpr = CHUNK // GROUP
        ALL: tl.constexpr = CHUNKS * KEPT
        LAST_GROUP: tl.constexpr = triton.next_power_of_2(CHUNKS * OWN) - 1
        rank = tl.arange(0, KEPT)
        lane = tl.arange(0, GROUP)[None, :]
        group = chunk * OWN + tl.arange(0, OWN)
        token = group[:, None] * GROUP + lane
        scores = tl.load(logits + token, mask=token < vocabulary, other=float("-inf"))
        highest = tl.max(scores.to(tl.float32), axis=1).to(scores.dtype)
        key = _keys(highest, group * GROUP < vocabulary, group, LAST_GROUP)
        parts += row * ALL
        tl.store(parts + chunk * KEPT + rank, tl.topk(key, KEPT))
        tl.debug_barrier()  # every thread has written before one of them says so
        if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") < CHUNKS - 1:
            return
        tl.store(arrivals + row, 0)

        entry = tl.arange(0, triton.next_power_of_2(ALL))
        key = tl.load(parts + entry, mask=entry < ALL, other=0, cache_modifier=".cg")
        none = _keys(tl.zeros_like(entry).to(scores.dtype), entry < 0, entry, LAST_GROUP)
        leading = tl.topk(tl.where(entry < ALL, key, none), KEPT)
        # In the order of their tokens, so that of equal scores the lowest token is best.
        leading = tl.sort((LAST_GROUP - (leading & LAST_GROUP)).to(tl.int32))
        LAST: tl.constexpr = KEPT * GROUP - 1
        token = leading[:, None] * GROUP + lane
        scores = tl.load(logits + token, mask=token < vocabulary, other=0.0)
        key = _keys(scores, token < vocabulary, rank[:, None] * GROUP + lane, LAST)
        best = tl.topk(tl.reshape(key, (KEPT * GROUP,)), KEPT)
        place = (LAST - (best & LAST)).to(tl.int32)
        own = tl.where((place // GROUP)[:, None] == rank[None, :], leading[None, :], 0)
        token = tl.sum(own, axis=1) * GROUP + place % GROUP
        wanted = rank < k
        found = tl.load(logits + token, mask=wanted, other=0.0)
        tl.store(values + row * k + rank, found, mask=wanted)
        tl.store(ids + row * k + rank, token.to(tl.int64), mask=wanted)
