"""Matrices as small integers: a float16 scale for each group of inputs, codes packed in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from domino_spec.errors import CheckpointError

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
_LARGEST_SCALE = torch.finfo(torch.float16).max
_AT_ONCE = 1 << 22
"""Weights that are quantised together: bounds the memory of large matrices."""


def quantise(weight: Tensor, *, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] as int8 and scales [rows, groups] as float16.

    Each group takes, among a few scales that clip its extreme more or less, the one with the
    least squared error. The last group of a row may be short.
    """
    weight = weight.detach().to("cpu", torch.float32)
    if not torch.isfinite(weight).all() or weight.abs().max() > _LARGEST_SCALE:
        raise CheckpointError(
            "a matrix holds values that are not finite or beyond float16; expected trained weights."
        )
    rows = max(1, _AT_ONCE // weight.shape[1])
    starts = range(0, weight.shape[0], rows)
    parts = [_quantise(weight[start : start + rows], bits, group_size) for start in starts]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def dequantise(codes: Tensor, scales: Tensor, *, group_size: int) -> Tensor:
    """The weights [rows, columns] as bfloat16: the exact product, rounded once."""
    spread = scales.float().repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]
    return (codes.float() * spread).to(torch.bfloat16)


def rounded(weights: Sequence[Tensor], *, bits: int, group_size: int) -> list[Tensor]:
    """Matrices as `quantise` and `dequantise` give them back, in float32 and where they are."""
    groups = [_groups(weight.detach().float(), group_size) for weight in weights]
    counts = [each[..., 0].numel() for each in groups]
    # All together: a step of training rounds every matrix of a drafter.
    together = torch.cat([each.flatten(0, 1) for each in groups])
    fitted = (_fit(part, bits) for part in torch.split(together, 8 * _AT_ONCE // group_size))
    values = torch.split(torch.cat([codes * scales for codes, scales in fitted]), counts)
    return [
        value.view_as(own).flatten(1)[:, : weight.shape[1]]
        for value, own, weight in zip(values, groups, weights, strict=True)
    ]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, columns] as they are stored: int8, or uint8 that holds several."""
    if bits == 8:
        return codes.contiguous()
    shared = 4 if bits == 6 else 2
    missing = -codes.shape[1] % shared
    shifted = F.pad(codes, (0, missing)).to(torch.int16) + (1 << (bits - 1))
    first, *rest = shifted.to(torch.uint8).view(len(codes), -1, shared).unbind(-1)
    if bits == 4:
        return first | rest[0] << 4
    second, third, fourth = rest
    packed = (
        first | (second & 3) << 6,
        second >> 2 | (third & 15) << 4,
        third >> 4 | fourth << 2,
    )
    return torch.stack(packed, dim=-1).flatten(1)


def unpack(packed: Tensor, *, bits: int, columns: int) -> Tensor:
    """The int8 codes [rows, columns] of what `pack` gave."""
    if bits == 8:
        return packed
    if bits == 4:
        codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    else:
        first, second, third = packed.view(len(packed), -1, 3).unbind(-1)
        parts = (
            first & 63,
            first >> 6 | (second & 15) << 2,
            second >> 4 | (third & 3) << 4,
            third >> 2,
        )
        codes = torch.stack(parts, dim=-1)
    return codes.flatten(1)[:, :columns].to(torch.int8) - (1 << (bits - 1))


def _quantise(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    codes, scales = _fit(_groups(weight, group_size), bits)
    codes = codes.flatten(1)[:, : weight.shape[1]].to(torch.int8)
    return codes, scales.squeeze(-1).half()


def _groups(weight: Tensor, group_size: int) -> Tensor:
    """[rows, columns] -> [rows, groups, group size], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % group_size))
    return padded.view(len(weight), -1, group_size)


def _fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [..., group size] and scales [..., 1], both in float32."""
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best_error = torch.full_like(extreme, torch.inf)
    best_scale, best_codes = torch.zeros_like(extreme), torch.zeros_like(groups)
    for clip in _CLIPS:
        # There is one more code below zero than above: a scale may turn the extreme to that side.
        for scale in (extreme.abs() * clip / highest, extreme * clip / lowest):
            scale = scale.half().float()
            codes = (groups / scale).nan_to_num(0.0).round().clamp(lowest, highest)
            error = (codes * scale - groups).square().sum(-1, keepdim=True)
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_scale = torch.where(better, scale, best_scale)
            best_codes = torch.where(better, codes, best_codes)
    return best_codes, best_scale
