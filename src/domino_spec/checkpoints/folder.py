"""Writing a checkpoint folder: tensors in shards, a config.json that says where they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from domino_spec import __version__
from domino_spec.checkpoints.locate import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, WEIGHTS_SUFFIX
from domino_spec.checkpoints.names import OFFSETS, to_public
from domino_spec.checkpoints.provenance import CONFIG_KEY, FORMAT_VERSION, Provenance
from domino_spec.checkpoints.staging import checked_folder, replacing, write_json
from domino_spec.checkpoints.vocabulary import offsets
from domino_spec.drafter import Drafter
from domino_spec.errors import ConfigError

MAX_SHARD_BYTES = 5 * 10**9


def public_weights(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's parameters by their public names."""
    return {to_public(name): p.detach() for name, p in drafter.named_parameters()}


def public_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The parameters and, of a reduced vocabulary, its map."""
    tensors = public_weights(drafter)
    if drafter.draft_tokens is not None:
        tensors[OFFSETS] = offsets(drafter.draft_tokens)
    return tensors


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells a type; only floating-point ones are stored."""
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype}; expected a floating-point type.")
    return str(dtype).removeprefix("torch.")


def write_folder(
    folder: str | Path,
    *,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    provenance: Provenance | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint and return its folder.

    Floating-point tensors are stored as `dtype`, with None each as it is.

    Everything is written beside `folder` first and then takes its name, so that an
    interruption leaves the old checkpoint; other files in the folder are kept.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number.")
    folder = checked_folder(folder)
    with replacing(folder) as staging:
        _write_tensors(tensors, staging, dtype=dtype, max_shard_bytes=max_shard_bytes)
        write_json(staging / CONFIG_FILE, {**config, CONFIG_KEY: _stamped(provenance).to_dict()})
    return folder


def _stamped(provenance: Provenance | None) -> Provenance:
    """What is known, and what wrote it down."""
    known = provenance or Provenance()
    return replace(
        known,
        format_version=FORMAT_VERSION,
        created_with=known.created_with or f"domino-spec {__version__}",
    )


def _write_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    types = {
        name: dtype if dtype and t.is_floating_point() else t.dtype for name, t in tensors.items()
    }
    sizes = {name: t.numel() * types[name].itemsize for name, t in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{index:05d}-of-{len(shards):05d}{WEIGHTS_SUFFIX}"
        part = {name: tensors[name].to("cpu", types[name]).contiguous() for name in names}
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
