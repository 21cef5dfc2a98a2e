"""Saving a drafter, in the public layout or packed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from domino_spec.checkpoints.folder import (
    MAX_SHARD_BYTES,
    dtype_name,
    public_tensors,
    public_weights,
    write_folder,
)
from domino_spec.checkpoints.names import OFFSETS
from domino_spec.checkpoints.packing import CODES, DTYPE, SCALES, Packing, choose_packing
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.checkpoints.public import write_public
from domino_spec.checkpoints.quantise import pack, quantise
from domino_spec.checkpoints.vocabulary import offsets
from domino_spec.drafter import Drafter


def save_drafter(
    drafter: Drafter,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder that public loaders accept, and return it.

    Everything is written beside `folder` first and then takes its name, so that an
    interruption leaves the old checkpoint; other files in the folder are kept.
    """
    dtype = drafter.dtype if dtype is None else dtype
    return write_folder(
        folder,
        tensors=public_tensors(drafter),
        config=write_public(drafter.config, dtype=dtype_name(dtype)),
        dtype=dtype,
        provenance=provenance,
        max_shard_bytes=max_shard_bytes,
    )


def save_packed(
    drafter: Drafter,
    folder: str | Path,
    *,
    bits: int | Mapping[str, int] = 8,
    group_size: int = 64,
    provenance: Provenance | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a checkpoint folder with matrices of 8, 6 or 4 bits, and return it.

    `bits` is one number for all matrices, or numbers by patterns of public tensor names
    (`layers.*`); what no pattern names, and the norms, are stored in bfloat16. Loading gives the
    same numbers in every type: those of the unpacked matrices, rounded to bfloat16.
    """
    tensors, packing = packed_tensors(public_weights(drafter), bits, group_size)
    if drafter.draft_tokens is not None:
        tensors[OFFSETS] = offsets(drafter.draft_tokens).int()
    return write_folder(
        folder,
        tensors=tensors,
        config=packing.written(write_public(drafter.config, dtype=DTYPE)),
        dtype=None,
        provenance=provenance,
        max_shard_bytes=max_shard_bytes,
    )


def packed_tensors(
    weights: Mapping[str, Tensor], bits: int | Mapping[str, int], group_size: int
) -> tuple[dict[str, Tensor], Packing]:
    """What is stored of these weights, and how the matrices among them are packed."""
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
    return tensors, packing
