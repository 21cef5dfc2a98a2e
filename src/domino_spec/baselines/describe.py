"""What files alone tell of a drafter of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from domino_spec.baselines.config import BaselineConfig
from domino_spec.baselines.files import inspect_baseline
from domino_spec.baselines.registry import (
    LOOKUP,
    PLAIN,
    block_kind,
    is_baseline_source,
    is_lookup,
    lookup_depth,
)
from domino_spec.checkpoints import Provenance, describe
from domino_spec.drafter import DrafterConfig
from domino_spec.errors import InputError


@dataclass(frozen=True, kw_only=True)
class AnyDescription:
    """A drafter before it is loaded."""

    kind: str
    config: DrafterConfig | BaselineConfig | None
    """None for prompt lookup, which has no files."""
    provenance: Provenance
    dtypes: tuple[str, ...] = ()
    """The types its matrices are stored in."""
    parameters: int = 0
    drafts: int
    """A cycle, unless somebody asks for another number."""


def describe_any(
    spec: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
) -> AnyDescription:
    """Check a checkpoint of any kind by its configuration and headers; `lookup` has neither."""
    named = str(spec)
    if named == PLAIN:
        raise InputError(f"{named!r} drafts nothing, so there is no drafter to describe.")
    if is_lookup(named):
        return AnyDescription(
            kind=LOOKUP, config=None, provenance=Provenance(), drafts=lookup_depth(named)
        )
    if is_baseline_source(spec, revision=revision):
        found = inspect_baseline(spec, revision=revision)
        return AnyDescription(
            kind=found.config.kind,
            config=found.config,
            provenance=found.provenance,
            dtypes=tuple(sorted({weight.dtype for weight in found.weights.values()})),
            parameters=sum(weight.parameters for weight in found.weights.values()),
            drafts=found.config.default_depth,
        )
    block = describe(
        spec, revision=revision, shift_label=shift_label, num_target_layers=num_target_layers
    )
    return AnyDescription(
        kind=block_kind(block.config),
        config=block.config,
        provenance=block.provenance,
        dtypes=block.dtypes,
        parameters=block.backbone_parameters + block.head_parameters,
        drafts=block.config.default_depth,
    )
