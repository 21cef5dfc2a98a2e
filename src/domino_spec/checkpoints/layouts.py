"""Which layout a config.json is in, and what it says about the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from domino_spec.checkpoints import public, speculators
from domino_spec.checkpoints.fields import Fields, texts
from domino_spec.checkpoints.overrides import Overrides
from domino_spec.checkpoints.packing import PACKED_ARCHITECTURE, Packing, read_packing
from domino_spec.checkpoints.provenance import CONFIG_KEY, Provenance
from domino_spec.drafter.config import DrafterConfig
from domino_spec.errors import ConfigError

PUBLIC = "public"
SPECULATORS = "speculators"
PACKED = "packed"
BASELINE_FIELD = "drafter"
"""Names the kind of a drafter that is none of ours (`domino_spec.baselines`)."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Everything a config.json states."""

    layout: str
    config: DrafterConfig
    provenance: Provenance
    packing: Packing | None = None


def read_config(values: Mapping[str, Any], overrides: Overrides) -> Reading:
    """Recognise the layout and read it. An `auto_map` is ignored, never executed."""
    layout = recognise(values)
    provenance = Provenance.from_dict(Fields(values).nested(CONFIG_KEY).values)
    packing: Packing | None = None
    if layout == PACKED:
        values, packing = read_packing(values)
    if layout in (PUBLIC, PACKED):
        config = public.read_public(values, overrides)
    else:
        config = speculators.read_speculators(values, overrides)
        if provenance.target_id is None:
            provenance = replace(provenance, target_id=speculators.verifier_id(values))
    return Reading(layout=layout, config=config, provenance=provenance, packing=packing)


def recognise(values: Mapping[str, Any]) -> str:
    """The name of the layout; an unknown one is refused by its architecture."""
    if values.get(speculators.TYPE_FIELD) is not None:
        return SPECULATORS
    architectures = texts(Fields(values)["architectures"]) or ()
    if set(architectures) & set(public.ARCHITECTURES):
        return PUBLIC
    section = values.get(public.SECTION)
    described = isinstance(section, Mapping) and section.get("projector_type") is not None
    if public.DSPARK_ARCHITECTURE in architectures and described:
        return PUBLIC
    if PACKED_ARCHITECTURE in architectures:
        return PACKED
    if values.get(BASELINE_FIELD) is not None:
        raise ConfigError(
            f"config.json describes a drafter of kind {values[BASELINE_FIELD]!r}; expected a "
            "Domino, DFlash or Markov drafter here. It can be trained, compared with them (domino "
            "bench), audited and examined, but not exported, simulated or served."
        )
    raise ConfigError(
        f"config.json says architectures = {list(architectures)}; expected one of "
        f"{[*public.ARCHITECTURES, PACKED_ARCHITECTURE]}, or {speculators.TYPE_FIELD!r}. This is "
        "not a DFlash or Domino drafter: point to the drafter's checkpoint, not to the target's."
    )
