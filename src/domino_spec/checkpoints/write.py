"""Saving a drafter, in the public layout or packed; a folder is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from domino_spec import __version__
from domino_spec.checkpoints.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PREVIOUS_MARK,
    WEIGHTS_FILE,
    WEIGHTS_SUFFIX,
)
from domino_spec.checkpoints.layouts import write_config
from domino_spec.checkpoints.packing import CODES, DTYPE, GROUP_SIZE, SCALES, choose_packing
from domino_spec.checkpoints.provenance import CONFIG_KEY, FORMAT_VERSION, Provenance
from domino_spec.checkpoints.quantise import pack, quantise
from domino_spec.checkpoints.tensors import OFFSETS, to_public
from domino_spec.drafter import DraftModule
from domino_spec.errors import CheckpointError, ConfigError

MAX_SHARD_BYTES = 5 * 10**9


def save_drafter(
    drafter: DraftModule,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder and return it; public loaders accept a block drafter's."""
    dtype = drafter.dtype if dtype is None else dtype
    return write_folder(
        folder,
        tensors=public_tensors(drafter),
        config=write_config(drafter.config, dtype=dtype_name(dtype)),
        dtype=dtype,
        provenance=provenance,
        max_shard_bytes=max_shard_bytes,
    )


def save_packed(
    drafter: DraftModule,
    folder: str | Path,
    *,
    bits: int | Mapping[str, int] = 8,
    group_size: int = GROUP_SIZE,
    provenance: Provenance | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder with matrices of 8, 6 or 4 bits, and return it.

    `bits` is one number for all matrices, or numbers by patterns of public tensor names
    (`layers.*`); what no pattern names, and the norms, are stored in bfloat16. Loading gives the
    same numbers in every type: those of the unpacked matrices, rounded to bfloat16.
    """
    weights = public_tensors(drafter)
    offsets = weights.pop(OFFSETS, None)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    packing = choose_packing(shapes, bits, group_size)
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name not in packing.bits:
            tensors[name] = weight.bfloat16()
            continue
        width = packing.bits[name]
        codes, scales = quantise(weight, bits=width, group_size=group_size)
        tensors |= {name + CODES: pack(codes, width), name + SCALES: scales}
    if offsets is not None:
        tensors[OFFSETS] = offsets.int()
    return write_folder(
        folder,
        tensors=tensors,
        config=packing.written(write_config(drafter.config, dtype=DTYPE)),
        dtype=None,
        provenance=provenance,
        max_shard_bytes=max_shard_bytes,
    )


def public_tensors(drafter: DraftModule) -> dict[str, Tensor]:
    """The parameters by their public names and, of a reduced vocabulary, its map."""
    tensors = {to_public(name): p.detach() for name, p in drafter.named_parameters()}
    if drafter.draft_tokens is not None:
        tokens = drafter.draft_tokens.to("cpu", torch.long)
        tensors[OFFSETS] = tokens - torch.arange(len(tokens))
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
    """Write a checkpoint and return its folder; see `replacing`.

    Floating-point tensors are stored as `dtype`, with None each as it is.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; expected a positive number.")
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; expected the name of a folder to save into.")
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


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder next to `folder` that takes its name in the end.

    An interruption leaves the old checkpoint; other files in the folder are kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(folder, ".saving-")
    staging.mkdir()
    try:
        yield staging
        for path in staging.iterdir():
            _sync(path)
        if folder.exists():
            _keep_other_files(folder, staging)
        _sync(staging)
        _take_name(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file as people like to read it."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
