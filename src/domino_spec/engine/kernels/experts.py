"""Mixtures of experts: each token's rows multiplied by the experts that it was routed to.

Pairs of a token and one of its experts are sorted by expert. Then two launches compute all experts'
MLPs: a program takes some columns of one expert and walks over the pairs that are its own, however
many there are. So shapes do not depend on the routing, the host need not know it, and a captured
graph serves any. A pair has the same bits whatever other pairs there are.

Of few tokens each expert's weights are read once, by the programs of the experts that were chosen;
the others' end at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from domino_spec.engine.kernels.overlap import overlap
from domino_spec.engine.kernels.pointwise import SILU, gate_reference
from domino_spec.engine.kernels.runtime import SWITCH, triton_available, usable

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

    gate_up: Tensor  # [experts, 2 * intermediate, hidden]: gate, up
    down: Tensor  # [experts, hidden, intermediate]


def unsupported_experts(
    target: Any, modules: Mapping[type[nn.Module], Sequence[Any]]
) -> str | None:
    """Why a target's routers and experts cannot be taken over; None if they can."""
    for kind, found in modules.items():
        for module in found:
            if type(module) is not kind or hasattr(module, "_hf_hook"):
                return f"its {type(module).__name__} is not {kind.__name__}"
    if target.device.type == "cuda" and not usable(target.lm_head.weight):
        return f"its experts need Triton's kernels on CUDA; install Triton, and leave {SWITCH} out"
    return None


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
    *,
    activation: str = SILU,
) -> Tensor:
    """The weighted sum of each token's experts, [tokens, hidden]."""
    if usable(x):
        pairs = _launch(x, routing, experts, activation)
    else:
        pairs = _pairs_reference(x, routing, experts, lambda y: gate_reference(y, activation))
    tokens, k = routing.weights.shape
    return (pairs.view(tokens, k, -1) * routing.weights.unsqueeze(2)).sum(dim=1)


def _pairs_reference(
    x: Tensor, routing: Routing, experts: Experts, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each pair's result, expert by expert: [tokens * k, hidden]."""
    k, offsets = routing.weights.shape[1], routing.offsets.tolist()
    result = x.new_empty(len(routing.order), x.shape[1])
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start < end:
            pairs = routing.order[start:end]
            gated = gate(F.linear(x[pairs // k], experts.gate_up[expert]))
            result[pairs] = F.linear(gated, experts.down[expert])
    return result


def _launch(x: Tensor, routing: Routing, experts: Experts, activation: str) -> Tensor:
    pairs, k = len(routing.order), routing.weights.shape[1]
    count, hidden, width = experts.down.shape
    half = x.element_size() <= 2  # without tensor cores tall tiles leave no registers
    rows = _ROWS[1] if half and pairs > _ROWS[0] * count else _ROWS[0]
    gated = x.new_empty(pairs, width)
    result = x.new_empty(pairs, hidden)
    assert x.stride(1) == 1
    for source, weight, out, chosen in (
        (x, experts.gate_up, gated, k),
        (gated, experts.down, result, 0),
    ):
        columns = out.shape[1]
        _experts[(count, triton.cdiv(columns, _COLUMNS))](
            source,
            weight,
            out,
            routing.order,
            routing.offsets,
            columns,
            source.stride(0),
            *weight.stride()[:2],
            K=source.shape[1],
            CHOSEN=chosen,
            ACTIVATION=activation,
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
        out,
        order,  # [pairs]
        offsets,  # [experts + 1]
        columns,
        x_stride,
        expert_stride,
        row_stride,
        K: tl.constexpr,
        CHOSEN: tl.constexpr,  # experts a token, in the first product; 0: in the second
        ACTIVATION: tl.constexpr,
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
        first_rows = weight + tl.minimum(column, columns - 1)[:, None] * row_stride
        second_rows = first_rows + columns * row_stride
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
                streamed = tl.load(first_rows + lane[None, :], mask=mask, other=0.0)
                first = tl.dot(fed, streamed.T, first, input_precision="ieee")
                if CHOSEN > 0:
                    streamed = tl.load(second_rows + lane[None, :], mask=mask, other=0.0)
                    second = tl.dot(fed, streamed.T, second, input_precision="ieee")
            kind = out.dtype.element_ty
            target = pair
            result = first
            if CHOSEN > 0:
                target = place
                opened = activated(first.to(kind).to(tl.float32), ACTIVATION)
                result = opened.to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
            spot = out + target[:, None] * columns + column[None, :]
            tl.store(spot, result.to(kind), mask=live[:, None] & inside[None, :])
        let_next_come(OVERLAP)
