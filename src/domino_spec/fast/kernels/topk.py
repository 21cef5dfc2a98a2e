"""The best few tokens of each row.

A row is cut into chunks, each reduced to its own best by one program; the last program of a row
to finish merges them. Candidates travel as keys (see `keys`), which sort without ties.

Within a chunk, half-precision logits make do with keys of 32 bits, at half the cost: as float32
their last 13 bits and more say nothing, which leaves room for a place in the chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.fast.kernels.keys import pack_twin, unpack_twin
from domino_spec.fast.kernels.overlap import overlap
from domino_spec.fast.kernels.runtime import triton_available, usable
from domino_spec.fast.kernels.scratch import scratch

MOST_CANDIDATES = 32
CHUNK = 4096


def top_candidates(
    logits: Tensor,  # [rows, V]
    k: int,
) -> tuple[Tensor, Tensor]:  # both [rows, k]
    """The k largest logits of each row, in logits' dtype, and their ids, int64.

    Largest first; of equal ones the lowest id first.
    """
    if usable(logits) and k <= MOST_CANDIDATES and logits.shape[0] > 0:
        return _launch(logits, k)
    return top_candidates_twin(logits, k)


def top_candidates_twin(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What `top_candidates` computes."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = pack_twin(logits, ids).topk(k, dim=1).values
    values, ids = unpack_twin(best)
    return values.to(logits.dtype), ids


def _launch(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    if not 1 <= k <= vocabulary:
        raise ValueError(f"{k} candidates of {vocabulary} tokens")
    kept = max(2, triton.next_power_of_2(k))
    chunks = triton.cdiv(vocabulary, CHUNK)
    parts, arrivals = scratch(
        logits.device, parts=rows * chunks * kept, counters=rows, dtype=torch.int64
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
        num_warps=8,
        **overlap(logits),
    )
    return values, ids


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.fast.kernels.keys import pack, unpack_ids, unpack_scores
    from domino_spec.fast.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _best_of_chunk(scores, start, inside, CHUNK: tl.constexpr, KEPT: tl.constexpr):
        """Keys of the KEPT best, falling; places with no token get keys below all others."""
        place = tl.arange(0, CHUNK)
        keys = pack(scores.to(tl.float32), start + place)
        if scores.dtype.primitive_bitwidth > 16:
            return tl.topk(tl.where(inside, keys, -(2**63)), KEPT)
        else:  # noqa: RET505 - Triton must not look at both
            LAST: tl.constexpr = CHUNK - 1
            ordered = (keys >> 32).to(tl.int32)
            short = (ordered & ~LAST) | (LAST - place)
            best = tl.topk(tl.where(inside, short, -(2**31)), KEPT)
            found = start + LAST - (best & LAST)
            # The bits that made room were 0, or turned to 1 with a negative score's others.
            ordered = tl.where(best < 0, best | LAST, best & ~LAST)
            return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - found).to(tl.int64)

    @triton.jit(do_not_specialize=["k"])
    def _top_kernel(
        logits,
        values,  # [rows, k]
        ids,  # [rows, k]
        parts,  # [rows, CHUNKS, KEPT] int64
        arrivals,  # [rows]
        stride,
        vocabulary,
        k,
        CHUNK: tl.constexpr,
        KEPT: tl.constexpr,
        CHUNKS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        chunk = tl.program_id(1)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocabulary
        scores = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=0.0)
        best = _best_of_chunk(scores, chunk * CHUNK, inside, CHUNK, KEPT)
        place = tl.arange(0, KEPT)
        group = parts + row * (CHUNKS * KEPT)
        if CHUNKS > 1:
            tl.store(group + chunk * KEPT + place, best)
            tl.debug_barrier()  # every thread has written before one of them says so
            if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") < CHUNKS - 1:
                return
            MERGED: tl.constexpr = triton.next_power_of_2(CHUNKS * KEPT)
            at = tl.arange(0, MERGED)
            keys = tl.load(
                group + at, mask=at < CHUNKS * KEPT, other=-(2**63), cache_modifier=".cg"
            )
            best = tl.topk(keys, KEPT)
            tl.store(arrivals + row, 0)
        found = unpack_scores(best).to(values.dtype.element_ty)
        tl.store(values + row * k + place, found, mask=place < k)
        tl.store(ids + row * k + place, unpack_ids(best), mask=place < k)
