"""What stands between products: norms and gates, where no product can take them along."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.runtime import triton_available, usable

_WIDEST = 16384
"""Numbers of a row that a program can hold."""
_CHUNK = 1024
SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
ACTIVATIONS = (SILU, GELU_TANH)
"""Of gates, by Transformers' names."""


def shrink(dtype: torch.dtype) -> float:
    """A factor that keeps rows times a norm's weights within the type's range."""
    return 1 / 64 if dtype == torch.float16 else 1.0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row of [m, width] by its root mean square, times the weight [width]."""
    if usable(x) and x.stride(1) == 1 and x.shape[1] <= _WIDEST and len(x):
        out = x.new_empty(x.shape)  # the rows of x may lie apart, as captured hidden states do
        size = triton.next_power_of_2(x.shape[1])
        warps = min(max(size // 512, 1), 8)
        _norm[(len(x),)](
            x, weight, out, x.shape[1], x.stride(0), eps, SIZE=size, num_warps=warps, **overlap(x)
        )
        return out
    return torch_rms_norm(x, weight, eps)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of rows of any shape [..., width]: one operation of PyTorch, for CPUs' sake."""
    wide = x.to(weight.dtype)  # weights of half precision's models may be in float32
    return F.rms_norm(wide, (x.shape[-1],), weight, eps).to(x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes, rounded as Transformers' modules would."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def weigh(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    padded: int,
    tokens: Tensor | None = None,
    rows: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Rows [m, width] times the weight, and their sums of squares [1, padded]; kernels alone.

    Where `shrink` would shrink them they are divided by their norm at once, which spares small ones
    the loss of their last bits; the sums are then those by which the reader divides no more. With
    tokens [m] the rows are those of a table that they name, times `scale`, and are written to
    `rows` too: to gather them in a launch of its own would take as long as all the rest.
    """
    count = len(x if tokens is None else tokens)
    out = x.new_empty(count, x.shape[1])
    sums = x.new_empty(1, padded, dtype=torch.float32)
    size = triton.next_power_of_2(x.shape[1])
    _weigh[(count,)](
        x, tokens, rows, weight, out, sums, x.shape[1], x.stride(0), eps, scale,
        SIZE=size, SHRINK=shrink(x.dtype), num_warps=min(max(size // 512, 1), 8), **overlap(x),
    )  # fmt: skip
    return out, sums


def add_and_weigh(
    x: Tensor,  # [m, width]
    inner: Tensor,  # [width]: the norm's weights
    residual: Tensor,  # [m, width]
    weight: Tensor,
    eps: float,
    *,
    padded: int,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rows` become residual + rms_norm(x, inner), then as in `weigh`; kernels alone."""
    out = x.new_empty(x.shape)
    sums = x.new_empty(1, padded, dtype=torch.float32)
    size = triton.next_power_of_2(x.shape[1])
    _add_and_weigh[(len(x),)](
        x, inner, residual, rows, weight, out, sums, x.shape[1], x.stride(0), residual.stride(0),
        rows.stride(0), eps,
        SIZE=size, SHRINK=shrink(x.dtype), num_warps=min(max(size // 512, 1), 8), **overlap(x),
    )  # fmt: skip
    return out, sums


def gate(x: Tensor, activation: str = SILU) -> Tensor:
    """The activation of the first half of each row of [m, 2 * width], times the second half."""
    if usable(x) and x.is_contiguous() and len(x):
        width = x.shape[1] // 2
        out = x.new_empty(len(x), width)
        _gate[(len(x), triton.cdiv(width, _CHUNK))](
            x, out, width, ACTIVATION=activation, CHUNK=_CHUNK, num_warps=4, **overlap(x)
        )
        return out
    return gate_reference(x, activation)


def gate_reference(x: Tensor, activation: str = SILU) -> Tensor:
    """What `gate` computes."""
    first, second = x.chunk(2, dim=-1)
    opened = F.silu(first) if activation == SILU else F.gelu(first, approximate="tanh")
    return opened.mul_(second)


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last

    @triton.jit
    def _norm(x, weight, out, width, stride, eps, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
        """One program for one row."""
        let_next_come(OVERLAP)
        lane = tl.arange(0, SIZE)
        inside = lane < width
        scale = tl.load(weight + lane, mask=inside, other=0.0)
        wait_for_last(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        wide = tl.load(x + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        kind = out.dtype.element_ty
        # One rounding before the weight, as the reference's.
        result = wide.to(kind).to(tl.float32) * scale.to(tl.float32)
        tl.store(out + row * width + lane, result.to(kind), mask=inside)

    @triton.jit
    def _weigh(
        x,
        tokens,  # [rows]: which rows of x, or None: all, in order
        rows,  # where they are wanted too, or None
        weight,
        out,
        sums,
        width,
        stride,
        eps,
        factor,  # of the rows that tokens name
        SIZE: tl.constexpr,
        SHRINK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one row."""
        let_next_come(OVERLAP)
        lane = tl.arange(0, SIZE)
        inside = lane < width
        scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        wait_for_last(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        source = row
        if tokens is not None:
            source = tl.load(tokens + row).to(tl.int64)
        own = tl.load(x + source * stride + lane, mask=inside, other=0.0)
        if tokens is not None:
            own = (own.to(tl.float32) * factor).to(own.dtype)
        if rows is not None:
            tl.store(rows + row * width + lane, own, mask=inside)
        _write_weighed(own, scale, out, sums, row, lane, inside, width, eps, SHRINK)

    @triton.jit
    def _write_weighed(own, scale, out, sums, row, lane, inside, width, eps, SHRINK: tl.constexpr):
        """A row times the weights, and its sum of squares."""
        wide = own.to(tl.float32)
        squares = tl.sum(wide * wide, axis=0)
        if SHRINK != 1.0:
            wide *= tl.rsqrt(squares / width + eps)
            squares = (1 / (SHRINK * SHRINK) - eps) * width
        tl.store(sums + row, squares)
        place = out + row * width + lane
        tl.store(place, (wide * scale).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _add_and_weigh(
        x,
        inner,
        residual,
        rows,
        weight,
        out,
        sums,
        width,
        stride,
        residual_stride,
        rows_stride,
        eps,
        SIZE: tl.constexpr,
        SHRINK: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for one row."""
        let_next_come(OVERLAP)
        lane = tl.arange(0, SIZE)
        inside = lane < width
        inner_scale = tl.load(inner + lane, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        wait_for_last(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        kind = out.dtype.element_ty
        wide = tl.load(x + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        # Rounded where the parts alone would be.
        added = (wide.to(kind).to(tl.float32) * inner_scale).to(kind).to(tl.float32)
        old = tl.load(residual + row * residual_stride + lane, mask=inside, other=0.0)
        own = (old.to(tl.float32) + added).to(kind)
        tl.store(rows + row * rows_stride + lane, own, mask=inside)
        _write_weighed(own, scale, out, sums, row, lane, inside, width, eps, SHRINK)

    @triton.jit
    def activated(x, ACTIVATION: tl.constexpr):
        """silu, or gelu by its tanh: 1 + tanh(z) is twice the sigmoid of 2 z."""
        z = x
        if ACTIVATION == "gelu_pytorch_tanh":
            z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(z)

    @triton.jit
    def _gate(x, out, width, ACTIVATION: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
        """One program for a chunk of one row."""
        wait_for_last(OVERLAP)
        let_next_come(OVERLAP)
        row = tl.program_id(0).to(tl.int64)
        lane = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = lane < width
        first = tl.load(x + row * 2 * width + lane, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + row * 2 * width + width + lane, mask=inside, other=0.0)
        kind = out.dtype.element_ty
        opened = activated(first, ACTIVATION).to(kind).to(tl.float32)
        result = opened * second.to(tl.float32)
        tl.store(out + row * width + lane, result.to(kind), mask=inside)
