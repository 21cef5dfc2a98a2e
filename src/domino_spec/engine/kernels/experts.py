"""Mixtures of experts: each token's rows multiplied by the experts that it was routed to.

Pairs of a token and one of its experts are sorted by expert. Then two launches compute all experts'
MLPs: a program takes some columns of one expert and walks over the pairs that are its own, however
many there are. So shapes do not depend on the routing, the host need not know it, and a captured
graph serves any. A pair has the same bits whatever other pairs there are.

Of few tokens each expert's weights are read once, by the programs of the experts that were chosen;
the others' end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.pointwise import SILU, gate_reference
from domino_spec.engine.kernels.runtime import triton_available, usable

_ROWS = (16, 64)
"""Pairs that a program multiplies at a time: where an expert has few on average, and elsewhere."""
_COLUMNS = 64
_DEPTH = 64


@dataclass(frozen=True)
class Routing:
    """Which experts compute which tokens. Pair p is token p // k's p % k-th expert."""

    weights: Tensor  # [tokens, k]: by which each expert's result is added
    order: Tensor  # [tokens * k]: pairs sorted by expert
    offsets: Tensor  # [experts + 1]: where each expert's pairs begin in `order`


@dataclass(frozen=True, kw_only=True)
class Experts:
    """All experts' MLPs of a layer."""

    gate_up: Tensor  # [experts, 2 * intermediate, hidden], of any strides
    down: Tensor  # [experts, hidden, intermediate]
    gate_up_bias: Tensor | None = None  # [experts, 2 * intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]


@dataclass(frozen=True)
class Gate:
    """activation(gate) * up; with a limit gate * sigmoid(alpha * gate) * (up + 1), both clamped."""

    activation: str = SILU
    interleaved: bool = False
    """Whether rows of gate and up take turns; else up's come after gate's."""
    limit: float | None = None
    """Neither is above it, and up is not below its negative."""
    alpha: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """[n, 2 * width] -> [n, width]."""
        if self.interleaved:
            x = torch.cat((x[:, ::2], x[:, 1::2]), dim=1)
        if self.limit is None:
            return gate_reference(x, self.activation)
        first, second = x.chunk(2, dim=1)
        first = first.clamp(max=self.limit)
        second = second.clamp(min=-self.limit, max=self.limit)
        return (second + 1) * (first * torch.sigmoid(first * self.alpha))


def route(
    chosen: Tensor,  # [tokens, k]
    weights: Tensor,  # [tokens, k]
    experts: int,
) -> Routing:
    """Sort pairs by expert, on the device."""
    by_expert, order = chosen.flatten().sort(stable=True)
    every = torch.arange(experts + 1, device=chosen.device)
    return Routing(weights, order, torch.searchsorted(by_expert, every))


def run_experts(
    x: Tensor,  # [tokens, hidden]
    routing: Routing,
    experts: Experts,
    gate: Gate,
) -> Tensor:
    """The weighted sum of each token's experts, [tokens, hidden]."""
    apply = _launch if usable(x) else _pairs_reference
    pairs = apply(x, routing, experts, gate)
    tokens, k = routing.weights.shape
    return (pairs.view(tokens, k, -1) * routing.weights.unsqueeze(2)).sum(dim=1)


def _pairs_reference(x: Tensor, routing: Routing, experts: Experts, gate: Gate) -> Tensor:
    """Each pair's result, expert by expert: [tokens * k, hidden]."""
    k, offsets = routing.weights.shape[1], routing.offsets.tolist()
    result = x.new_empty(len(routing.order), x.shape[1])
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start < end:
            pairs = routing.order[start:end]
            bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
            gated = gate(F.linear(x[pairs // k], experts.gate_up[expert], bias))
            bias = None if experts.down_bias is None else experts.down_bias[expert]
            result[pairs] = F.linear(gated, experts.down[expert], bias)
    return result


def _launch(x: Tensor, routing: Routing, experts: Experts, gate: Gate) -> Tensor:
    pairs, k = len(routing.order), routing.weights.shape[1]
    count, hidden, width = experts.down.shape
    half = x.element_size() <= 2  # without tensor cores tall tiles leave no registers
    rows = _ROWS[1] if half and pairs > _ROWS[0] * count else _ROWS[0]
    gated = x.new_empty(pairs, width)
    result = x.new_empty(pairs, hidden)
    assert x.stride(1) == 1
    for source, weight, bias, out, chosen in (
        (x, experts.gate_up, experts.gate_up_bias, gated, k),
        (gated, experts.down, experts.down_bias, result, 0),
    ):
        columns = out.shape[1]
        _experts[(count, triton.cdiv(columns, _COLUMNS))](
            source,
            weight,
            bias,
            out,
            routing.order,
            routing.offsets,
            columns,
            source.stride(0),
            *weight.stride(),
            K=source.shape[1],
            CHOSEN=chosen,
            ACTIVATION=gate.activation,
            INTERLEAVED=gate.interleaved,
            LIMIT=gate.limit,
            ALPHA=gate.alpha,
            ROWS=rows,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH if half else _DEPTH // 2,
            num_warps=4,
            num_stages=4,
            **overlap(x),
        )
    return result


if triton_available():
    import triton
    import triton.language as tl

    from domino_spec.engine.kernels.overlap import let_next_come, wait_for_last
    from domino_spec.engine.kernels.pointwise import activated

    @triton.jit
    def _experts(
        x,
        weight,  # [experts, columns or 2 * columns, K]
        bias,  # [experts, columns or 2 * columns], or None
        out,
        order,  # [pairs]
        offsets,  # [experts + 1]
        columns,
        x_stride,
        expert_stride,
        row_stride,
        depth_stride,
        K: tl.constexpr,
        CHOSEN: tl.constexpr,  # experts a token, in the first product; 0: in the second
        ACTIVATION: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        LIMIT: tl.constexpr,
        ALPHA: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """One program for some columns of one expert, over all pairs of it.

        The first product reads its token's row and writes gated rows where its pair is in the
        order; the second reads these and writes to where its pair is among all.
        """
        wait_for_last(OVERLAP)
        expert = tl.program_id(0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        depth = tl.arange(0, DEPTH)
        inside = column < columns
        weight += expert.to(tl.int64) * expert_stride
        first_row = tl.minimum(column, columns - 1)
        second_row = first_row + columns
        if CHOSEN > 0 and INTERLEAVED:
            first_row *= 2
            second_row = first_row + 1
        first_rows = weight + first_row[:, None] * row_stride
        second_rows = weight + second_row[:, None] * row_stride
        for at in range(start, end, ROWS):
            place = at + tl.arange(0, ROWS)
            live = place < end
            pair = tl.load(order + place, mask=live, other=0)
            source = place
            if CHOSEN > 0:
                source = pair // CHOSEN
            first = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            second = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for step in range(0, K, DEPTH):
                lane = step + depth
                fed = tl.load(
                    x + source[:, None] * x_stride + lane[None, :],
                    mask=live[:, None] & (lane < K)[None, :],
                    other=0.0,
                )
                mask = (lane < K)[None, :]
                streamed = tl.load(first_rows + lane[None, :] * depth_stride, mask=mask, other=0.0)
                first = tl.dot(fed, streamed.T, first, input_precision="ieee")
                if CHOSEN > 0:
                    streamed = tl.load(
                        second_rows + lane[None, :] * depth_stride, mask=mask, other=0.0
                    )
                    second = tl.dot(fed, streamed.T, second, input_precision="ieee")
            kind = out.dtype.element_ty
            target = pair
            if bias is not None:
                shift = bias + expert * (columns if CHOSEN == 0 else 2 * columns)
                first += tl.load(shift + first_row)[None, :]
                if CHOSEN > 0:
                    second += tl.load(shift + second_row)[None, :]
            result = first
            if CHOSEN > 0:
                target = place
                first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
                if LIMIT is None:
                    result = activated(first, ACTIVATION).to(kind).to(tl.float32) * second
                else:
                    first = tl.minimum(first, LIMIT)
                    second = tl.minimum(tl.maximum(second, -LIMIT), LIMIT)
                    result = (second + 1) * (first * tl.sigmoid(first * ALPHA))
            spot = out + target[:, None] * columns + column[None, :]
            tl.store(spot, result.to(kind), mask=live[:, None] & inside[None, :])
        let_next_come(OVERLAP)
