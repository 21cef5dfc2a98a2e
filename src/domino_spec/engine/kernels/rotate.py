"""From one projection to what attention needs: norms, rotary positions, keys and values stored.

A cache is [pages, kv heads, tokens a page, head_dim]. Row r of a batch lies in the pages pages[r]
and has starts[r] tokens there; its new tokens take the places after them. Pages and starts stay on
the device, so that a captured graph serves any rows. A place past the last page is never written. A
token is rotated by its place, or by a position that is given for it. Angles may be those of the
first part of a head alone: what comes after it stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.paging import paging
from domino_spec.engine.kernels.runtime import triton_available, usable


def rotate_and_store(
    qkv: Tensor,  # [rows, n, (heads + 2 * kv heads) * head_dim]: query, key, value heads
    cos: Tensor,  # [positions, rotated part of head_dim] float32
    sin: Tensor,
    keys: Tensor,  # [pages, kv heads, tokens a page, head_dim]
    values: Tensor,
    pages: Tensor,  # [rows, pages a row]
    starts: Tensor,  # [rows] int64
    *,
    heads: int,
    q_norm: Tensor | None = None,  # [head_dim]
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    positions: Tensor | None = None,  # [rows, n] int64
) -> Tensor:
    """The rotated query [rows, n, heads, head_dim]; rotated keys and values go to the caches."""
    apply = _launch if usable(qkv) else rotate_reference
    return apply(qkv, cos, sin, keys, values, pages, starts, heads, q_norm, k_norm, eps, positions)


def store(
    kv: Tensor,  # [rows, n, layers, 2 * kv heads * head_dim]: key heads, value heads
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,  # [layers, pages, kv heads, tokens a page, head_dim]
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    *,
    k_norm: Tensor | None = None,  # [layers, head_dim]
    eps: float = 0.0,
    positions: Tensor | None = None,
) -> None:
    """Keys and values alone, of several layers at once: what a drafter's context is made of."""
    if usable(kv):
        place = (cos, sin, keys, values, pages, starts)
        _launch(kv.flatten(2), *place, 0, None, k_norm, eps, positions)
        return
    for layer in range(len(keys)):
        norm = None if k_norm is None else k_norm[layer]
        part = kv[:, :, layer].contiguous()
        place = (cos, sin, keys[layer], values[layer], pages, starts)
        rotate_reference(part, *place, 0, None, norm, eps, positions)


def rotate_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    positions: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch, as Qwen3 of Transformers rounds it."""
    rows, n, _ = qkv.shape
    kv_heads, page, head_dim = keys.shape[1:]
    capacity = pages.shape[1] * page
    steps = torch.arange(n, device=qkv.device)
    places = starts.unsqueeze(1) + steps if positions is None else positions  # [rows, n]
    places = places.clamp(max=cos.shape[0] - 1)
    rotary = (cos[places].to(qkv.dtype).unsqueeze(2), sin[places].to(qkv.dtype).unsqueeze(2))
    parts = qkv.view(rows, n, -1, head_dim).split((heads, kv_heads, kv_heads), dim=2)
    query = _rotated(_normed(parts[0], q_norm, eps), rotary)  # [rows, n, heads, head_dim]
    key = _rotated(_normed(parts[1], k_norm, eps), rotary)

    # A token past the capacity stands in for the last one that fits: both write the same there.
    room = (capacity - 1 - starts).unsqueeze(1)  # [rows, 1]; negative where nothing fits
    source = torch.minimum(steps, room.clamp(min=0))  # [rows, n]
    spots = (starts.unsqueeze(1) + source).clamp(max=capacity - 1)
    where = (pages.gather(1, spots // page).long(), slice(None), spots % page)
    fits = (room >= 0).view(rows, 1, 1, 1)
    row = torch.arange(rows, device=qkv.device).unsqueeze(1)
    for cache, new in ((keys, key), (values, parts[2])):
        cache[where] = torch.where(fits, new[row, source], cache[where])
    return query


def _normed(states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return states
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(states.dtype)).to(states.dtype)


def _rotated(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    part, rest = states.tensor_split([rotary[0].shape[-1]], dim=-1)
    first, second = part.chunk(2, dim=-1)
    part = part * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]
    return torch.cat((part, rest), dim=-1)


def _launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    starts: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    positions: Tensor | None = None,
) -> Tensor:
    rows, n, width = qkv.shape
    if keys.dim() == 4:
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    layers, _, kv_heads, page, head_dim = keys.shape
    assert width == layers * (heads + 2 * kv_heads) * head_dim
    assert layers == 1 or not heads
    assert not heads or (q_norm is None) == (k_norm is None)
    assert keys.stride() == values.stride()
    assert keys.stride()[3:] == (head_dim, 1)
    assert qkv.is_contiguous()
    assert pages.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert positions is None or positions.is_contiguous()
    query = qkv.new_empty(rows, n, heads, head_dim)
    _rotate[(n, layers * (heads + 2 * kv_heads), rows)](
        qkv,
        cos,
        sin,
        q_norm if heads else k_norm,
        k_norm,
        query,
        keys,
        values,
        pages,
        starts,
        positions,
        n,
        pages.shape[1] * page,
        pages.shape[1],
        cos.shape[0],
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        width,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        NORMED=k_norm is not None,
        TURNED=cos.shape[1] // 2,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
        **overlap(qkv),
        **paging(pages, keys),
    )
    return query


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last
    from domino_spec.engine.kernels.paging import page_of

    @triton.jit
    def _times(left, right, DTYPE: tl.constexpr):
        # One rounding a product, as PyTorch's: a fused multiply-add would skip it.
        return (left.to(tl.float32) * right.to(tl.float32)).to(DTYPE).to(tl.float32)

    @triton.jit(do_not_specialize=["n", "capacity", "row_pages", "table_size"])
    def _rotate(
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        query,
        keys,
        values,
        pages,  # [rows, row_pages]
        starts,
        positions,  # [rows, n], or None: places
        n,
        capacity,
        row_pages,
        table_size,
        layer_stride,
        page_stride,
        head_stride,
        width,
        eps,
        HEADS: tl.constexpr,
        KV_HEADS: tl.constexpr,
        NORMED: tl.constexpr,
        TURNED: tl.constexpr,
        HALF: tl.constexpr,
        HALF_PADDED: tl.constexpr,
        OVERLAP: tl.constexpr,
        PAGE: tl.constexpr,
    ):
        """One program for one head of one token: pairs of its numbers, [HALF] of them.

        TURNED of the pairs are rotated: those of the numbers before 2 * TURNED.
        """
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        step, row = tl.program_id(0), tl.program_id(2)
        head = tl.program_id(1)
        layer = head * 0
        if HEADS == 0:  # queries come of one layer at a time
            layer = head // (2 * KV_HEADS)
            head = head % (2 * KV_HEADS)
        token = row * n + step
        dtype = qkv.dtype.element_ty
        lane = tl.arange(0, HALF_PADDED)
        inside = lane < HALF
        one, other = lane, lane + HALF
        if TURNED < HALF:
            one = tl.where(lane < TURNED, lane, lane + TURNED)
            other = tl.where(lane < TURNED, lane + TURNED, lane + HALF)
        source = qkv + token * width + (layer * 2 * KV_HEADS + head) * 2 * HALF
        first = tl.load(source + one, mask=inside, other=0.0)
        second = tl.load(source + other, mask=inside, other=0.0)
        spot = tl.load(starts + row) + step
        if head < HEADS + KV_HEADS:
            if NORMED:
                norm = q_norm
                if head >= HEADS:
                    norm = k_norm + layer * 2 * HALF
                wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
                squares = tl.sum(wide_first * wide_first + wide_second * wide_second)
                scale = tl.rsqrt(squares / (2 * HALF) + eps)
                weight_first = tl.load(norm + one, mask=inside, other=0.0)
                weight_second = tl.load(norm + other, mask=inside, other=0.0)
                first = _times((wide_first * scale).to(dtype), weight_first, dtype).to(dtype)
                second = _times((wide_second * scale).to(dtype), weight_second, dtype).to(dtype)
            position = spot
            if positions is not None:
                position = tl.load(positions + token)
            angle = tl.minimum(position, table_size - 1) * 2 * TURNED + lane
            cosine = tl.load(cos + angle, mask=lane < TURNED, other=1.0).to(dtype)
            sine = tl.load(sin + angle, mask=lane < TURNED, other=0.0).to(dtype)
            turned = _times(first, cosine, dtype) - _times(second, sine, dtype)
            second = (_times(second, cosine, dtype) + _times(first, sine, dtype)).to(dtype)
            first = turned.to(dtype)
        if head < HEADS:
            target = query + (token * HEADS + head) * 2 * HALF
            tl.store(target + one, first, mask=inside)
            tl.store(target + other, second, mask=inside)
        else:
            page, spot_there = page_of(pages + row * row_pages, spot, spot < capacity, PAGE)
            place = page * page_stride + layer.to(tl.int64) * layer_stride
            place += spot_there * 2 * HALF
            inside = inside & (spot < capacity)
            if head < HEADS + KV_HEADS:
                target = keys + place + (head - HEADS) * head_stride
            else:
                target = values + place + (head - HEADS - KV_HEADS) * head_stride
            tl.store(target + one, first, mask=inside)
            tl.store(target + other, second, mask=inside)
