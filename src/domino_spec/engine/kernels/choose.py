"""Choosing tokens on the device: the best one, or one drawn by its probability.

A draw is the best token too, once each logit, divided by the temperature, has got Gumbel noise of
its own. The noise is a hash of (seed, position, token): no state to keep, the same draw in
whatever batch or order it is made, and the same integers here and in the kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from domino_spec.decoding.noise import WORD, gumbel, hashed_words, keys, noised
from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import on_host, triton_available, usable
from domino_spec.engine.kernels.scratch import scratch

CHUNK = 4096
_HOST_CHUNK = 1 << 17
"""Numbers that a CPU works on at a time: two cores' second-level caches hold them."""
_LEAST_NOISE = -math.log(24 * math.log(2))
"""`gumbel`'s, at u = 1 - 2^-24."""


def choose(
    logits: Tensor,  # [rows, V]
    *,
    temperature: Tensor | None = None,  # [rows]
    seeds: Tensor | None = None,  # [rows] int64
    positions: Tensor | None = None,  # [rows] int64
    tokens: Tensor | None = None,  # [rows, V] int64
) -> Tensor:  # [rows] int64
    """A column for each row: the best where the temperature is 0 or none is given, else drawn.

    Of equal ones the lowest; never one at -inf, unless all are, nor one that is not a number. A
    column is a token's id, unless `tokens` says whose noise it gets.
    """
    if temperature is not None and (seeds is None or positions is None):
        raise ValueError("draws need seeds and positions")
    if not usable(logits) or not len(logits):
        if temperature is not None and on_host(logits):
            assert seeds is not None
            assert positions is not None
            return _draw_on_host(logits, temperature, seeds, positions, tokens)
        return choose_reference(
            logits, temperature=temperature, seeds=seeds, positions=positions, tokens=tokens
        )
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if tokens is not None and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    rows, vocabulary = logits.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocabulary))
    chunks = triton.cdiv(vocabulary, chunk)
    parts, arrivals = scratch(logits.device, parts=rows * chunks, counters=rows, dtype=torch.int64)
    chosen = torch.empty(rows, device=logits.device, dtype=torch.int64)
    _choose_kernel[(rows, chunks)](
        logits,
        logits if temperature is None else temperature,
        chosen if seeds is None else seeds,
        chosen if positions is None else positions,
        chosen if tokens is None else tokens,
        chosen,
        parts,
        arrivals,
        logits.stride(0),
        0 if tokens is None else tokens.stride(0),
        vocabulary,
        CHUNK=chunk,
        CHUNKS=chunks,
        DRAWS=temperature is not None,
        NAMED=tokens is not None,
        num_warps=8,
        **overlap(logits),
    )
    return chosen


def choose_reference(
    logits: Tensor,
    *,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """What `choose` computes."""
    scores = logits.float()
    if temperature is not None:
        assert seeds is not None
        assert positions is not None
        if tokens is None:
            tokens = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
        scores = noised(scores, tokens, temperature, seeds, positions)
    if on_host(scores):  # NumPy many times faster: the first of equal ones, or else of NaNs
        best = torch.from_numpy(scores.numpy().argmax(axis=1))
        if not scores.gather(1, best.unsqueeze(1)).isnan().any():
            return best  # no second look at all scores
    return scores.masked_fill(scores.isnan(), -torch.inf).argmax(dim=1)


def _draw_on_host(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor | None
) -> Tensor:
    """What `choose_reference` draws, with noise computed for the few columns that may win.

    Noise is at most -log u of its uniform number u, and at least `_LEAST_NOISE`. So the best logit
    gives a score that the winner reaches, and a column wins only if u <= exp(logit - that score):
    hashes of all columns and one exponential tell which.
    """
    if not len(logits):
        return positions.clone()
    warm = (temperature > 0).unsqueeze(1)
    heat = torch.where(warm, temperature.float().unsqueeze(1), 1.0)
    names = torch.arange(logits.shape[1]).unsqueeze(0) if tokens is None else tokens
    names = names.to(torch.int32).expand(len(logits), -1)
    first, second = keys(seeds.unsqueeze(1), positions.unsqueeze(1))
    found: list[tuple[Tensor, ...]] = []
    step = max(_HOST_CHUNK // logits.shape[1], 1)
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        scores = logits[part].float() / heat[part]  # [rows, V]
        best = scores.amax(dim=1, keepdim=True)
        if not best.isfinite().all():
            return choose_reference(
                logits, temperature=temperature, seeds=seeds, positions=positions, tokens=tokens
            )
        # Less what rounding may take off: bounds may let in columns too many, never one too few.
        reached = best + torch.where(warm[part], _LEAST_NOISE, 0.0) - 0.01 - best.abs() * 2.0**-20
        words = hashed_words((first[part], second[part]), names[part])
        bound = (scores - (reached - 32 * math.log(2))).exp_()
        may_win = words.view(torch.uint32).float() <= bound
        # NumPy finds the few true ones many times faster.
        at = torch.from_numpy(may_win.flatten().numpy().nonzero()[0])
        found.append((at + start * logits.shape[1], scores.view(-1)[at], words.view(-1)[at]))
    at, kept, bits = (torch.cat(each) for each in zip(*found, strict=True))
    rows, columns = at // logits.shape[1], at % logits.shape[1]
    kept = torch.where(warm.squeeze(1)[rows], kept + gumbel(bits.long() & WORD), kept)
    highest = kept.new_full((len(logits),), -torch.inf).scatter_reduce_(0, rows, kept, "amax")
    wins = kept == highest[rows]
    none = torch.full((len(logits),), logits.shape[1])
    return none.scatter_reduce_(0, rows[wins], columns[wins], "amin")  # the first of equal ones


def restrict(
    logits: Tensor,  # [rows, V]
    *,
    temperature: Tensor,  # [rows]; 0 = greedy, never restricted
    top_k: Tensor | None = None,  # [rows] integers; 0 = off
    top_p: Tensor | None = None,  # [rows]; 1 = off
    min_p: Tensor | None = None,  # [rows]; 0 = off
) -> Tensor:  # [rows, V]
    """The logits as they are, but -inf where Transformers' warpers would remove a token.

    Temperature, top-k, top-p and min-p, in Transformers' order. None spares the work that a tensor
    of "off" would cost. Transformers rounds 1 - top_p from float64; so does this if top_p is one.
    """
    draws = (temperature > 0)[:, None]
    scores = logits.float() / torch.where(draws, temperature.float()[:, None], 1.0)
    vocabulary = scores.shape[1]
    if top_k is not None or top_p is not None:
        ordered, ids = scores.sort(dim=1)  # the best last
        if top_k is not None:
            kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long()
            least = ordered.gather(1, vocabulary - kept[:, None])  # [rows, 1]
            ordered = ordered.masked_fill(ordered < least, -torch.inf)
            scores = scores.masked_fill(scores < least, -torch.inf)
        if top_p is not None:
            tail = ordered.softmax(dim=1).cumsum(dim=1) <= (1 - top_p).float()[:, None]
            tail &= (top_p < 1)[:, None]
            tail[:, -1] = False
            scores = scores.masked_fill(tail.scatter(1, ids, tail), -torch.inf)
    if min_p is not None:
        chances = scores.softmax(dim=1)
        unlikely = chances < min_p.float()[:, None] * chances.amax(dim=1, keepdim=True)
        scores = scores.masked_fill(unlikely, -torch.inf)
    return logits.masked_fill(draws & (scores == -torch.inf), -torch.inf)


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.gumbel import noised_logits
    from domino_spec.engine.kernels.keys import pack, unpack_ids
    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _choose_kernel(
        logits,
        temperature,
        seeds,
        positions,
        names,  # [rows, vocabulary] where columns are not tokens' ids
        chosen,  # [rows]
        parts,  # [rows, CHUNKS] int64: the best key of each chunk
        arrivals,  # [rows]
        stride,
        name_stride,
        vocabulary,
        CHUNK: tl.constexpr,
        CHUNKS: tl.constexpr,
        DRAWS: tl.constexpr,
        NAMED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        let_next_come(OVERLAP)
        wait_for_last(OVERLAP)
        row = tl.program_id(0)
        chunk = tl.program_id(1)
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = column < vocabulary
        where = logits + row.to(tl.int64) * stride + column
        scores = tl.load(where, mask=inside, other=float("-inf")).to(tl.float32)
        if DRAWS:
            heat = tl.load(temperature + row).to(tl.float32)
            if heat > 0:
                seed = tl.load(seeds + row)
                position = tl.load(positions + row)
                token = column
                if NAMED:
                    named = names + row.to(tl.int64) * name_stride + column
                    token = tl.load(named, mask=inside, other=0).to(tl.int32)
                scores = noised_logits(scores, token, heat, seed, position)
        scores = tl.where(scores == scores, scores, float("-inf"))
        best = tl.max(pack(scores, column), axis=0)
        if CHUNKS > 1:
            tl.store(parts + row * CHUNKS + chunk, best)
            tl.debug_barrier()  # it is written before the program is counted in
            if tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu") < CHUNKS - 1:
                return
            at = tl.arange(0, triton.next_power_of_2(CHUNKS))
            keys = tl.load(
                parts + row * CHUNKS + at, mask=at < CHUNKS, other=-(2**63), cache_modifier=".cg"
            )
            best = tl.max(keys, axis=0)
            tl.store(arrivals + row, 0)
        tl.store(chosen + row, unpack_ids(best))
