"""Describing a drafter from its config and safetensors headers: no weights, no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.checkpoints.fields import Overrides
from domino_spec.checkpoints.files import locate, read_headers
from domino_spec.checkpoints.layouts import read_config
from domino_spec.checkpoints.packing import Packing
from domino_spec.checkpoints.provenance import Provenance
from domino_spec.checkpoints.tensors import TensorPlan, is_head, plan_tensors


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint as its config and headers tell it, validated like a loaded one."""

    config: Any
    """A `DrafterConfig`, unless other kinds were asked for too."""
    provenance: Provenance
    layout: str
    source: str
    revision: str | None
    """The commit of a checkpoint that came from the hub."""
    tensor_count: int
    backbone_parameters: int
    head_parameters: int
    byte_count: int
    dtypes: tuple[str, ...]
    packing: Packing | None
    """How the matrices of a packed checkpoint are stored."""
    ignored_tensors: tuple[str, ...]
    """Stored copies of target tensors; the drafter uses the target's own."""

    @property
    def parameters(self) -> int:
        """How many numbers it has learnt."""
        return self.backbone_parameters + self.head_parameters


def describe(
    source: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
    any_kind: bool = False,
) -> Description:
    """Check and count a checkpoint from its config and safetensors headers alone.

    `any_kind` takes drafters that are no block drafters too.
    """
    overrides = Overrides(shift_label=shift_label, num_target_layers=num_target_layers)
    return Description(**inspect(source, revision, overrides, any_kind=any_kind)[0])


def inspect(
    source: str | Path, revision: str | None, overrides: Overrides, *, any_kind: bool
) -> tuple[dict[str, Any], TensorPlan]:
    """Find a checkpoint and match its tensors with its config: a description's fields, the plan."""
    files = locate(source, revision=revision)
    reading = read_config(files.read_config(), overrides, any_kind=any_kind)
    plan = plan_tensors(
        read_headers(files), reading.config, layout=reading.layout, packing=reading.packing
    )
    stored = [*plan.weights.values(), *([plan.offsets] if plan.offsets else [])]
    head = sum(h.parameters for name, h in plan.weights.items() if is_head(name))
    return {
        **vars(reading),
        "source": files.source,
        "revision": files.revision,
        "tensor_count": len(stored),
        "backbone_parameters": sum(h.parameters for h in plan.weights.values()) - head,
        "head_parameters": head,
        "byte_count": sum(h.byte_count for h in stored),
        "dtypes": tuple(sorted({h.dtype for h in plan.weights.values()})),
        "ignored_tensors": plan.ignored,
    }, plan
