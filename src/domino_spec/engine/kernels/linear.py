"""Linear layers with what stands before and after them in a transformer.

With few rows a product costs what it takes to read the weights, so everything else must ride along
(`few_rows`): the gate, the bias, the residual, and the norm before the next product. With many rows
arithmetic counts, and the vendor's library does better.

A norm is two things: a weight for each column and a divisor for each row. The product that makes
rows knows both before they are read: it also writes its rows times the next norm's weights, and
sums of squares. The product that reads them divides at its end. So no step of its loop has anything
to do but multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.engine.kernels import few_rows
from domino_spec.engine.kernels.few_rows import padded, takes
from domino_spec.engine.kernels.packing import Parts, Table, Weight, look_up, plain_rows, product
from domino_spec.engine.kernels.pointwise import (
    SILU,
    add_and_weigh,
    gate,
    gate_reference,
    rms_norm,
    rms_norm_reference,
    weigh,
)
from domino_spec.engine.kernels.runtime import usable
from domino_spec.quantization import QuantizedWeight, ScaledWeight
from domino_spec.quantization.rows import gate_rows


@dataclass(frozen=True)
class Normed:
    """Rows whose next reader wants them normed."""

    rows: Tensor  # [m, K]
    norm: Tensor  # [K]
    eps: float
    weighted: Tensor | None = None
    """[m, K]: the rows times the norm's weights; what few rows' products read."""
    squares: Tensor | None = None
    """[sources, padded m] float32: each row's sum of squares, in so many pieces."""


def normed(rows: Tensor, norm: Tensor, eps: float) -> Normed:
    """Rows that were made by something other than a product."""
    if usable(rows) and takes(len(rows), rows.dtype):
        return Normed(rows, norm, eps, *weigh(rows, norm, eps, padded=padded(len(rows))))
    return Normed(rows, norm, eps)


def add_normed(
    x: Tensor,  # [m, K]
    inner: Tensor,  # [K]
    residual: Tensor,  # [m, K]
    norm: Tensor,  # [K]
    eps: float,
    *,
    out: Tensor | None = None,  # [m, K]: where the rows are wanted
) -> Normed:
    """residual + rms_norm(x, inner), whose rows are normed before they are read again."""
    if usable(x) and takes(len(x), x.dtype) and x.stride(1) == residual.stride(1) == 1:
        rows = torch.empty_like(x) if out is None else out
        made = add_and_weigh(x, inner, residual, norm, eps, padded=padded(len(x)), rows=rows)
        return Normed(rows, norm, eps, *made)
    return normed(torch.add(residual, rms_norm(x, inner, eps), out=out), norm, eps)


def embedded(tokens: Tensor, table: Table, norm: Tensor, eps: float) -> Normed:
    """The rows of an embedding [vocabulary, K] for tokens [m], whose first reader norms them."""
    if (read := plain_rows(table)) is not None:
        source, scale = read
        whole = source.stride(1) == 1 and tokens.is_contiguous()
        if usable(source) and takes(len(tokens), source.dtype) and whole:
            rows = source.new_empty(len(tokens), source.shape[1])
            size = padded(len(tokens))
            made = weigh(source, norm, eps, padded=size, tokens=tokens, rows=rows, scale=scale)
            return Normed(rows, norm, eps, *made)
    return Normed(look_up(table, tokens), norm, eps)


def linear(
    x: Tensor | Normed,  # [m, K]
    weight: Weight,  # [N, K], or [groups, n, K] with N = groups * n
    *,
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [m, width]
    gated: bool = False,
    activation: str = SILU,
) -> Tensor:  # [m, width]
    """`x @ weight.T`, perhaps of the RMS-normed x, perhaps gated, plus bias and residual.

    width is N, or N // 2 when gated: then weight's rows are [gate; up] and the result is
    activation(gate) * up. The kernel rounds where the reference does, but for the norm: the
    reference feeds round(round(x / rms) * norm) to the product, the kernel round(x * norm), and
    divides the float32 sums by rms. So it rounds once where the reference rounds twice.
    """
    if in_blocks(weight):
        if not gated or activation == SILU:
            return _multiply_blocks(x, weight, bias=bias, residual=residual, gated=gated)
        result = gate(_multiply_blocks(x, weight, bias=bias), activation)
        return result if residual is None else residual + result
    if (fed := _for_few_rows(x, weight)) is not None:
        return few_rows.launch(
            *fed, bias=bias, residual=residual, gated=gated, activation=activation
        )[0]
    result = _product(x, weight, bias)
    if gated:
        result = gate(result, activation)
    return result if residual is None else residual + result


def linear_then_norm(
    x: Tensor | Normed,
    weight: Weight,
    norm: Tensor,  # [N]
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,  # [m, N]: where the rows are wanted
) -> Normed:
    """`linear`, whose rows are normed before they are read again."""
    if in_blocks(weight):
        rows = _multiply_blocks(x, weight, bias=bias, residual=residual)
        return Normed(rows if out is None else out.copy_(rows), norm, eps)
    if (fed := _for_few_rows(x, weight)) is not None:
        made = few_rows.launch(*fed, bias=bias, residual=residual, then=norm, out=out)
        return Normed(made[0], norm, eps, *made[1:])
    rows = _product(x, weight, bias)
    if residual is not None:
        rows = torch.add(residual, rows, out=out)
    elif out is not None:
        rows = out.copy_(rows)
    return Normed(rows, norm, eps)


def linear_reference(
    x: Tensor | Normed,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = SILU,
) -> Tensor:
    """What `linear` computes, rounded as Transformers' modules would."""
    if isinstance(x, Normed):
        x = rms_norm_reference(x.rows, x.norm, x.eps)
    result = _grouped_product(x, weight, bias)
    if gated:
        result = gate_reference(result, activation)
    return result if residual is None else residual + result


def in_blocks(weight: Weight) -> TypeGuard[QuantizedWeight | Parts]:
    """Whether a CPU multiplies it as it is, in the blocks of one kind or several."""
    parts = weight.parts if isinstance(weight, Parts) else (weight,)
    return all(isinstance(part, QuantizedWeight) for part in parts)


def _multiply_blocks(
    x: Tensor | Normed,
    weight: QuantizedWeight | Parts,
    *,
    bias: Tensor | None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """One call for the norm before a product, the product, and what comes after it."""
    rows, norm, eps = (x, None, 0.0) if isinstance(x, Tensor) else (x.rows, x.norm, x.eps)
    if isinstance(weight, QuantizedWeight):
        return weight.linear(rows, bias, norm=norm, eps=eps, residual=residual, gated=gated)
    parts = cast("tuple[QuantizedWeight, ...]", weight.parts)
    done = torch.cat([part.linear(rows, norm=norm, eps=eps) for part in parts], dim=-1)
    if bias is not None:
        done += bias
    done = gate_rows(done) if gated else done
    return done if residual is None else residual + done


def _for_few_rows(
    x: Tensor | Normed, weight: Weight
) -> tuple[Tensor, Tensor | None, float, Tensor | ScaledWeight] | None:
    """What the kernel for few rows is launched with; None where it cannot be."""
    rows = x.rows if isinstance(x, Normed) else x
    if not isinstance(weight, Tensor | ScaledWeight) or not usable(rows):
        return None
    if not takes(len(rows), rows.dtype, weight):
        return None
    if isinstance(weight, Tensor) and weight.stride(-1) != 1:
        return None
    if isinstance(x, Tensor):
        return (x, None, 0.0, weight) if x.stride(1) == 1 else None
    if x.weighted is None:
        x = normed(x.rows, x.norm, x.eps)
    assert x.weighted is not None
    return x.weighted, x.squares, x.eps, weight


def _product(x: Tensor | Normed, weight: Weight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, Parts) and usable(x.rows if isinstance(x, Normed) else x):
        whole = torch.cat([linear(x, part) for part in weight.parts], dim=1)
        return whole if bias is None else whole + bias
    if isinstance(x, Normed):
        x = rms_norm(x.rows, x.norm, x.eps)
    return _grouped_product(x, weight, bias)


def _grouped_product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, Tensor) or weight.dim() == 2:
        return product(x, weight, bias)
    whole = torch.cat([F.linear(x, part) for part in weight], dim=1)
    return whole if bias is None else whole + bias
