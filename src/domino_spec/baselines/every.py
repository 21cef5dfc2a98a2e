"""One way to save, load and rebuild a drafter of whatever kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_spec.baselines.files import AnyBaseline, is_baseline, load_baseline, save_baseline
from domino_spec.checkpoints import Provenance, load_drafter, save_drafter, save_packed
from domino_spec.checkpoints.files import locate
from domino_spec.checkpoints.write import MAX_SHARD_BYTES
from domino_spec.drafter import Drafter

AnyDrafter = Drafter | AnyBaseline


def save_any(
    drafter: AnyDrafter,
    folder: str | Path,
    *,
    provenance: Provenance | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """A checkpoint folder of the drafter's kind: a block drafter's is the public one."""
    if isinstance(drafter, Drafter):
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
    if isinstance(drafter, Drafter):
        return save_packed(drafter, folder, bits=bits, **options)
    return save_baseline(drafter, folder, bits=bits, **options)


def load_any(
    source: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[AnyDrafter, Provenance]:
    """A drafter on the CPU, in eval mode, and where it comes from."""
    if is_baseline(locate(source).read_config()):
        baseline = load_baseline(source, dtype=dtype)
        return baseline.drafter, baseline.provenance
    checkpoint = load_drafter(source, dtype=dtype)
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
