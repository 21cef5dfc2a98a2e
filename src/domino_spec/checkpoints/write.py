"""Saving a drafter, in the public layout or packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from domino_spec import __version__
from domino_spec.checkpoints.locate import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, WEIGHTS_SUFFIX
from domino_spec.checkpoints.names import OFFSETS, to_public
from domino_spec.checkpoints.packing import CODES, DTYPE, SCALES, choose_packing
from domino_spec.checkpoints.provenance import CONFIG_KEY, FORMAT_VERSION, Provenance
from domino_spec.checkpoints.public import write_public
from domino_spec.checkpoints.quantise import pack, quantise
from domino_spec.checkpoints.staging import checked_folder, replacing, write_json
from domino_spec.checkpoints.vocabulary import offsets
from domino_spec.drafter import Drafter
from domino_spec.errors import ConfigError


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write a checkpoint folder that public loaders accept, and return it.

    Everything is written beside `folder` first and then takes its name, so that an
    interruption leaves the old checkpoint; other files in the folder are kept.
    """
    dtype = drafter.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype}; expected a floating-point type.")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number.")
    folder = checked_folder(folder)
    with replacing(folder) as staging:
        _write_weights(drafter, staging, dtype=dtype, max_shard_bytes=max_shard_bytes)
        config = write_public(drafter.config, dtype=str(dtype).removeprefix("torch."))
        config[CONFIG_KEY] = _stamped(provenance).to_dict()
        write_json(staging / CONFIG_FILE, config)
    return folder


def save_packed(
    drafter: Drafter,
    folder: str | Path,
    *,
    bits: int | Mapping[str, int] = 8,
    group_size: int = 64,
    provenance: Provenance | None = None,
) -> Path:
    """Write a checkpoint folder with matrices of 8, 6 or 4 bits, and return it.

    `bits` is one number for all matrices, or numbers by patterns of public tensor names
    (`layers.*`); what no pattern names, and the norms, are stored in bfloat16. Loading gives the
    same numbers in every type: those of the unpacked matrices, rounded to bfloat16.
    """
    weights = _public_weights(drafter)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    packing = choose_packing(shapes, bits, group_size)
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name not in packing.bits:
            tensors[name] = _storable(weight, DTYPE)
            continue
        width = packing.bits[name]
        codes, scales = quantise(weight, bits=width, group_size=group_size)
        tensors |= {name + CODES: pack(codes, width), name + SCALES: scales}
    if drafter.draft_tokens is not None:
        tensors[OFFSETS] = offsets(drafter.draft_tokens).int()
    folder = checked_folder(folder)
    with replacing(folder) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        config = packing.written(write_public(drafter.config, dtype="bfloat16"))
        config[CONFIG_KEY] = _stamped(provenance).to_dict()
        write_json(staging / CONFIG_FILE, config)
    return folder


def _public_weights(drafter: Drafter) -> dict[str, Tensor]:
    return {to_public(name): p.detach() for name, p in drafter.named_parameters()}


def _write_weights(
    drafter: Drafter, folder: Path, *, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    tensors = _public_weights(drafter)
    if drafter.draft_tokens is not None:
        tensors[OFFSETS] = offsets(drafter.draft_tokens)
    sizes = {
        name: t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize
        for name, t in tensors.items()
    }
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{index:05d}-of-{len(shards):05d}{WEIGHTS_SUFFIX}"
        part = {name: _storable(tensors[name], dtype) for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index_values = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index_values)


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _storable(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_floating_point():
        tensor = tensor.to("cpu", dtype)
    return tensor.contiguous()


def _stamped(provenance: Provenance | None) -> Provenance:
    known = provenance or Provenance()
    return replace(
        known,
        format_version=FORMAT_VERSION,
        created_with=known.created_with or f"domino-spec {__version__}",
    )
