"""Saving a drafter in the public layout; an existing checkpoint is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from domino_spec import __version__
from domino_spec.checkpoints.locate import (
    CONFIG_FILE,
    INDEX_FILE,
    PREVIOUS_MARK,
    WEIGHTS_FILE,
    WEIGHTS_SUFFIX,
)
from domino_spec.checkpoints.names import OFFSETS, to_public
from domino_spec.checkpoints.provenance import CONFIG_KEY, FORMAT_VERSION, Provenance
from domino_spec.checkpoints.public import write_public
from domino_spec.checkpoints.vocabulary import offsets
from domino_spec.drafter import Drafter
from domino_spec.errors import CheckpointError, ConfigError


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
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected the name of a folder to save into.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(folder, ".saving-")
    staging.mkdir()
    try:
        _write_weights(drafter, staging, dtype=dtype, max_shard_bytes=max_shard_bytes)
        config = write_public(drafter.config, dtype=str(dtype).removeprefix("torch."))
        config[CONFIG_KEY] = _stamped(provenance).to_dict()
        _write_json(staging / CONFIG_FILE, config)
        for path in staging.iterdir():
            _sync(path)
        if folder.exists():
            _keep_other_files(folder, staging)
        _sync(staging)
        _take_name(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _write_weights(
    drafter: Drafter, folder: Path, *, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    tensors = {to_public(name): p.detach() for name, p in drafter.named_parameters()}
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
        _write_json(folder / INDEX_FILE, index_values)


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


def _keep_other_files(old: Path, new: Path) -> None:
    """Link what is no part of the checkpoint (a licence, logs, nested runs) into its successor."""

    def replaced(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != old:
            return set()
        own = {CONFIG_FILE, INDEX_FILE}
        return {name for name in names if name in own or name.endswith(WEIGHTS_SUFFIX)}

    shutil.copytree(
        old, new, symlinks=True, ignore=replaced, copy_function=_link, dirs_exist_ok=True
    )


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, destination, follow_symlinks=False)


def _take_name(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        _sync(folder.parent)
        return
    previous = _sibling(folder, PREVIOUS_MARK)
    folder.rename(previous)
    try:
        staging.rename(folder)
    except BaseException:
        previous.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sibling(folder: Path, mark: str) -> Path:
    return folder.with_name(f".{folder.name}{mark}{uuid4().hex[:8]}")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
