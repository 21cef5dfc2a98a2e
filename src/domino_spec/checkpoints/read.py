"""Loading a drafter: its configuration, its weights, what its files say about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.description import Description, inspect
from domino_spec.checkpoints.fields import Overrides
from domino_spec.checkpoints.files import TensorHeader, open_tensors
from domino_spec.checkpoints.packing import PackedTensor
from domino_spec.checkpoints.quantise import dequantise, unpack
from domino_spec.checkpoints.tensors import OFFSETS, TensorPlan, Weight, to_state
from domino_spec.drafter import (
    DrafterConfig,
    DraftModel,
    DraftModule,
    Eagle3,
    Eagle3Config,
    Medusa,
    MedusaConfig,
)
from domino_spec.errors import CheckpointError, ConfigError

MODELS: Mapping[type, type[DraftModule]] = {
    DrafterConfig: DraftModel,
    MedusaConfig: Medusa,
    Eagle3Config: Eagle3,
}
"""The module of each kind of configuration."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Description):
    """A loaded drafter and what its files say about it."""

    drafter: Any
    """A `DraftModel`, unless other kinds were asked for too."""


def load_drafter(
    source: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    any_kind: bool = False,
) -> Checkpoint:
    """Load a drafter from a folder, a safetensors file or a hub id, in eval mode.

    `shift_label` answers for a config that does not say and may not contradict one that does;
    `num_target_layers` serves a layout that does not state it.
    Without `dtype` the stored type is kept; packed matrices become bfloat16. `any_kind` takes
    drafters that are no block drafters too.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype}; expected a floating-point type.")
    overrides = Overrides(shift_label=shift_label, num_target_layers=num_target_layers)
    described, plan = inspect(source, revision, overrides, any_kind=any_kind)
    device = torch.device("cpu" if device is None else device)
    config = described["config"]
    with torch.device("meta"):
        drafter = MODELS[type(config)](config)
    _fill(drafter, plan, dtype=dtype or getattr(torch, plan.dtype), device=device)
    return Checkpoint(drafter=drafter.eval(), **described)


def _fill(
    drafter: DraftModule, plan: TensorPlan, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a drafter on the meta device its memory, one file after the other."""
    config = drafter.config
    by_file: dict[Path, list[tuple[str, TensorHeader]]] = defaultdict(list)
    unpacked: dict[str, Tensor] = {}
    for public, weight in plan.weights.items():
        if isinstance(weight, PackedTensor):
            unpacked[to_state(public, config)] = read_one(weight).to(device, dtype)
        else:
            by_file[weight.file].append((to_state(public, config), weight))
    drafter.load_state_dict(unpacked, strict=False, assign=True)
    for path, tensors in by_file.items():
        with open_tensors(path, device=str(device)) as file:
            part = {state: file.get_tensor(h.name).to(dtype) for state, h in tensors}
        drafter.load_state_dict(part, strict=False, assign=True)
    if plan.offsets is not None:
        tokens = draft_tokens(
            read_one(plan.offsets),
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
        )
        drafter.draft_tokens = None if tokens is None else tokens.to(device)
    drafter.compute_buffers(device)
    for module in drafter.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def read_one(weight: Weight) -> Tensor:
    """One stored tensor; a packed matrix comes in bfloat16."""
    if isinstance(weight, PackedTensor):
        return _unpacked(weight)
    with open_tensors(weight.file) as file:
        tensor: Tensor = file.get_tensor(weight.name)
        return tensor


def _unpacked(weight: PackedTensor) -> Tensor:
    packed, scales = read_one(weight.codes), read_one(weight.scales)
    if not torch.isfinite(scales).all():
        raise CheckpointError(
            f"tensor {weight.scales.name!r} holds scales that are not finite; the file is "
            "damaged. Download it again."
        )
    codes = unpack(packed, bits=weight.bits, columns=weight.shape[1])
    return dequantise(codes, scales, group_size=weight.group_size)


def draft_tokens(
    offsets: Tensor, *, vocab_size: int, draft_vocab_size: int | None
) -> Tensor | None:
    """Target id of each draft token; None for the target's whole vocabulary in its own order."""
    tokens = torch.arange(len(offsets)) + offsets.to("cpu", torch.long)
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        index = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{OFFSETS}[{index}] maps to target id {int(tokens[index])}, outside the vocabulary of "
            f"{vocab_size}; the map belongs to another target or is damaged. Name the target it "
            "was made for, or download the drafter again."
        )
    times_used = tokens.bincount()
    if (times_used > 1).any():
        token = int(times_used.argmax())
        raise CheckpointError(
            f"{OFFSETS} maps {int(times_used[token])} draft tokens to target id {token}; expected "
            "each target id at most once. The map is damaged: download the drafter again, or "
            "reduce its vocabulary anew."
        )
    if draft_vocab_size is not None:
        return tokens
    if offsets.any():
        raise CheckpointError(
            f"{OFFSETS} reorders the vocabulary, but config.json states no reduced one; set "
            "draft_vocab_size, or remove the map."
        )
    return None
