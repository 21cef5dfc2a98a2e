"""Loading a drafter, and describing one without reading its weights."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from domino_spec.checkpoints.headers import TensorHeader, open_tensors, read_headers
from domino_spec.checkpoints.layouts import Reading, read_config
from domino_spec.checkpoints.locate import CheckpointFiles, locate
from domino_spec.checkpoints.names import is_head, to_state
from domino_spec.checkpoints.overrides import Overrides
from domino_spec.checkpoints.packing import PackedTensor, Packing
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.checkpoints.tensors import TensorPlan, empty_drafter, plan_tensors
from domino_spec.checkpoints.vocabulary import draft_tokens
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.drafter.backbone import RotaryPositions
from domino_spec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded drafter and what its files say about it."""

    drafter: Drafter
    config: DrafterConfig
    provenance: Provenance
    layout: str
    source: str
    revision: str | None
    """The commit of a checkpoint that came from the hub."""
    ignored_tensors: tuple[str, ...]
    """Stored copies of target tensors; the drafter uses the target's own."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint as its config and headers tell it, validated like a loaded one."""

    config: DrafterConfig
    provenance: Provenance
    layout: str
    source: str
    revision: str | None
    tensor_count: int
    backbone_parameters: int
    head_parameters: int
    byte_count: int
    dtypes: tuple[str, ...]
    packing: Packing | None
    """How the matrices of a packed checkpoint are stored."""
    ignored_tensors: tuple[str, ...]


def load_drafter(
    source: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Checkpoint:
    """Load a drafter from a folder, a safetensors file or a hub id, in eval mode.

    `shift_label` answers for a config that does not say and may not contradict one that does;
    `num_target_layers` serves a layout that does not state it.
    Without `dtype` the stored type is kept; packed matrices become bfloat16.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype}; expected a floating-point type.")
    overrides = Overrides(shift_label=shift_label, num_target_layers=num_target_layers)
    files, reading, plan = _inspect(source, revision, overrides)
    device = torch.device("cpu" if device is None else device)
    drafter = empty_drafter(reading.config)
    _fill(drafter, plan, dtype=dtype or plan.dtype, device=device)
    return Checkpoint(
        drafter=drafter.eval(),
        config=reading.config,
        provenance=reading.provenance,
        layout=reading.layout,
        source=files.source,
        revision=files.revision,
        ignored_tensors=plan.ignored,
    )


def describe(
    source: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
) -> Description:
    """Check and count a checkpoint from its config and safetensors headers alone."""
    overrides = Overrides(shift_label=shift_label, num_target_layers=num_target_layers)
    files, reading, plan = _inspect(source, revision, overrides)
    stored = [*plan.weights.values(), *([plan.offsets] if plan.offsets else [])]
    head = sum(h.parameters for name, h in plan.weights.items() if is_head(name))
    return Description(
        config=reading.config,
        provenance=reading.provenance,
        layout=reading.layout,
        source=files.source,
        revision=files.revision,
        tensor_count=len(stored),
        backbone_parameters=sum(h.parameters for h in plan.weights.values()) - head,
        head_parameters=head,
        byte_count=sum(h.byte_count for h in stored),
        dtypes=tuple(sorted({h.dtype for h in plan.weights.values()})),
        packing=reading.packing,
        ignored_tensors=plan.ignored,
    )


def _inspect(
    source: str | Path, revision: str | None, overrides: Overrides
) -> tuple[CheckpointFiles, Reading, TensorPlan]:
    files = locate(source, revision=revision)
    reading = read_config(files.read_config(), overrides)
    plan = plan_tensors(
        read_headers(files), reading.config, layout=reading.layout, packing=reading.packing
    )
    return files, reading, plan


def _fill(drafter: Drafter, plan: TensorPlan, *, dtype: torch.dtype, device: torch.device) -> None:
    """Give a drafter on the meta device its memory, one file after the other."""
    by_file: dict[Path, list[tuple[str, TensorHeader]]] = defaultdict(list)
    unpacked: dict[str, Tensor] = {}
    for public, weight in plan.weights.items():
        if isinstance(weight, PackedTensor):
            unpacked[to_state(public)] = weight.read().to(device, dtype)
        else:
            by_file[weight.file].append((to_state(public), weight))
    drafter.load_state_dict(unpacked, strict=False, assign=True)
    for path, tensors in by_file.items():
        with open_tensors(path, device=str(device)) as file:
            part = {state: file.get_tensor(h.name).to(dtype) for state, h in tensors}
        drafter.load_state_dict(part, strict=False, assign=True)
    if plan.offsets is not None:
        config = drafter.config
        tokens = draft_tokens(
            read_one(plan.offsets),
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
        )
        drafter.draft_tokens = None if tokens is None else tokens.to(device)
    # Not stored: the frequencies are computed, which on the meta device left no values.
    drafter.backbone.rotary = RotaryPositions(drafter.config).to(device)
    for module in drafter.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def read_one(header: TensorHeader) -> Tensor:
    """One stored tensor."""
    with open_tensors(header.file) as file:
        tensor: Tensor = file.get_tensor(header.name)
        return tensor
