"""Trained drafters of any kind as folders; block drafters' layouts are those of `checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.checkpoints import load_drafter, save_drafter, save_packed
from domino_spec.checkpoints.fields import Fields
from domino_spec.checkpoints.files import TensorHeader, locate, read_headers
from domino_spec.checkpoints.layouts import BASELINE_FIELD
from domino_spec.checkpoints.packing import DTYPE, SECTION, read_section
from domino_spec.checkpoints.provenance import CONFIG_KEY, Provenance
from domino_spec.checkpoints.read import draft_tokens, read_one
from domino_spec.checkpoints.tensors import (
    OFFSETS,
    Weight,
    named_weights,
    require_offsets,
    require_shapes,
)
from domino_spec.checkpoints.write import (
    MAX_SHARD_BYTES,
    dtype_name,
    offsets,
    packed_tensors,
    write_folder,
)
from domino_spec.drafter import DraftModel
from domino_spec.drafters.base import DraftModule
from domino_spec.drafters.config import MODULE_CONFIGS, ModuleConfig
from domino_spec.drafters.eagle3 import Eagle3
from domino_spec.drafters.medusa import Medusa

AnyBaseline = DraftModule[Any]
MODELS: Mapping[str, type[AnyBaseline]] = {"medusa": Medusa, "eagle3": Eagle3}
_DTYPE = "dtype"


@dataclass(frozen=True, kw_only=True)
class BaselineCheckpoint:
    """A loaded baseline and what its files say about it."""

    drafter: AnyBaseline
    config: ModuleConfig
    provenance: Provenance
    source: str


def build(config: ModuleConfig, tokens: Tensor | None = None) -> AnyBaseline:
    """The module of a configuration."""
    return MODELS[config.kind](config, tokens)


def is_baseline(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of these drafters'."""
    return values.get(BASELINE_FIELD) in MODULE_CONFIGS


def save_baseline(
    drafter: AnyBaseline,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
    bits: int | Mapping[str, int] | None = None,
    group_size: int = 64,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder and return it; with `bits`, matrices of 8, 6 or 4 bits."""
    config = drafter.config.to_dict()
    tensors = {name: parameter.detach() for name, parameter in drafter.named_parameters()}
    stored: torch.dtype | None = drafter.dtype if dtype is None else dtype
    if bits is not None:
        tensors, packing = packed_tensors(tensors, bits, group_size)
        config[SECTION] = packing.section()
        stored = None
    if drafter.draft_tokens is not None:
        tensors[OFFSETS] = offsets(drafter.draft_tokens).int()
    return write_folder(
        folder,
        tensors=tensors,
        config={**config, _DTYPE: DTYPE if stored is None else dtype_name(stored)},
        dtype=stored,
        provenance=provenance,
        max_shard_bytes=max_shard_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class BaselineFiles:
    """A checked checkpoint whose tensors are not read yet."""

    source: str
    config: ModuleConfig
    provenance: Provenance
    weights: Mapping[str, Weight]
    offsets: TensorHeader | None
    """The map of a reduced vocabulary."""


def inspect_baseline(source: str | Path, *, revision: str | None = None) -> BaselineFiles:
    """Check a checkpoint by its config and headers alone."""
    files = locate(source, revision=revision)
    values = files.read_config()
    packing = read_section(values) if SECTION in values else None
    provenance = Provenance.from_dict(Fields(values).nested(CONFIG_KEY).values)
    own = {name: v for name, v in values.items() if name not in (SECTION, CONFIG_KEY, _DTYPE)}
    config = ModuleConfig.from_dict(own)
    with torch.device("meta"):
        drafter = build(config)
    expected = {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    headers = read_headers(files)
    found = {name: header for name, header in headers.items() if name != OFFSETS}
    weights = named_weights(found, expected, packing)
    require_shapes(weights, expected)
    require_offsets(
        headers.get(OFFSETS),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
    )
    return BaselineFiles(
        source=files.source,
        config=config,
        provenance=provenance,
        weights=weights,
        offsets=headers.get(OFFSETS),
    )


def load_baseline(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> BaselineCheckpoint:
    """Load one in eval mode; without `dtype` in the stored type, packed matrices in bfloat16."""
    files = inspect_baseline(source, revision=revision)
    config = files.config
    with torch.device("meta"):
        drafter = build(config)
    state = {name: read_one(weight) for name, weight in files.weights.items()}
    kept = dtype or next(iter(state.values())).dtype
    device = torch.device("cpu" if device is None else device)
    placed = {name: tensor.to(device, kept) for name, tensor in state.items()}
    drafter.load_state_dict(placed, strict=False, assign=True)
    if files.offsets is not None:
        tokens = draft_tokens(
            read_one(files.offsets),
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
        )
        drafter.draft_tokens = None if tokens is None else tokens.to(device)
    drafter.compute_buffers(device)
    return BaselineCheckpoint(
        drafter=drafter.eval(),
        config=config,
        provenance=files.provenance,
        source=files.source,
    )


# Any kind -------------------------------------------------------------------------------------

AnyDrafter = DraftModel | AnyBaseline


def save_any(
    drafter: AnyDrafter,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """A checkpoint folder of the drafter's kind: a block drafter's is the public one."""
    if isinstance(drafter, DraftModel):
        return save_drafter(drafter, folder, provenance=provenance, dtype=dtype)
    return save_baseline(drafter, folder, provenance=provenance, dtype=dtype)


def pack_any(
    drafter: AnyDrafter,
    folder: str | Path,
    *,
    bits: int | Mapping[str, int] = 8,
    provenance: Provenance | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """The same with matrices of 8, 6 or 4 bits."""
    options: dict[str, Any] = {"provenance": provenance, "max_shard_bytes": max_shard_bytes}
    if isinstance(drafter, DraftModel):
        return save_packed(drafter, folder, bits=bits, **options)
    return save_baseline(drafter, folder, bits=bits, **options)


def load_any(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    num_target_layers: int | None = None,
) -> tuple[AnyDrafter, Provenance]:
    """A drafter on the CPU, in eval mode, and where it comes from."""
    if is_baseline(locate(source).read_config()):
        baseline = load_baseline(source, dtype=dtype)
        return baseline.drafter, baseline.provenance
    checkpoint = load_drafter(source, dtype=dtype, num_target_layers=num_target_layers)
    return checkpoint.drafter, checkpoint.provenance


def drafter_like(drafter: AnyDrafter, weights: Mapping[str, Tensor]) -> AnyDrafter:
    """A drafter on the CPU of the same kind and shape, with these weights."""
    tokens = None if drafter.draft_tokens is None else drafter.draft_tokens.cpu()
    made: AnyDrafter = type(drafter)(drafter.config, tokens)
    own = dict(made.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return made.eval()
