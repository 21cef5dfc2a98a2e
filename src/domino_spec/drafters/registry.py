"""Any drafter by its name, folder, hub id or module: `open_drafter`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from domino_spec.checkpoints import Provenance, describe, load_drafter, require_fit
from domino_spec.checkpoints.files import locate
from domino_spec.checkpoints.layouts import KIND_FIELD
from domino_spec.decoding.drafter import Drafter, PlainDecoding
from domino_spec.drafter import DrafterConfig, DraftModel, Eagle3, Medusa, ModuleConfig
from domino_spec.drafter.names import LOOKUP, PLAIN, lookup_depth, prefix_of
from domino_spec.drafters.block import BlockDrafter, check_window
from domino_spec.drafters.eagle3 import Eagle3Drafter
from domino_spec.drafters.facts import read_target_facts, target_facts
from domino_spec.drafters.lookup import LookupDrafter
from domino_spec.drafters.medusa import MedusaDrafter
from domino_spec.errors import InputError
from domino_spec.targets import LoadedTarget, Target

NAMED: dict[str, Callable[[str, LoadedTarget], Drafter]] = {
    PLAIN: lambda _spec, _target: PlainDecoding(),
    LOOKUP: lambda spec, _target: LookupDrafter(depth=lookup_depth(spec), name=spec),
}
"""Drafters without files, by what stands before a colon: of the whole name and the target."""

DRAFTERS: dict[type[nn.Module], Callable[..., Drafter]] = {
    DraftModel: BlockDrafter,
    Medusa: MedusaDrafter,
    Eagle3: Eagle3Drafter,
}
"""The drafter of each kind of trained model."""


class MismatchWarning(UserWarning):
    """The drafter was made for something slightly different."""


def open_drafter(
    source: str | Path | nn.Module | Drafter,
    target: Target | LoadedTarget,
    tokenizer: Any | None = None,
    *,
    depth: int | None = None,
    tree: int | None = None,
    candidates: int | None = None,
    draft_window: int | None = None,
    draft_sinks: int | None = None,
    shift_label: bool | None = None,
    revision: str | None = None,
    provenance: Provenance | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> Drafter:
    """The drafter that `source` names, for a target, in the target's place and type.

    `plain` drafts nothing; `lookup` or `lookup:DEPTH` looks the text up; any other name is a
    checkpoint of any kind: a folder, a file, a hub id or `released:NAME`. A loaded model or a
    drafter is taken as it is. `candidates`, `draft_window`, `draft_sinks` and `shift_label` are for
    block drafters.
    """
    options: dict[str, Any] = {
        "candidates": candidates, "draft_window": draft_window, "draft_sinks": draft_sinks
    }  # fmt: skip
    loaded = target if isinstance(target, LoadedTarget) else LoadedTarget.of(target)
    if isinstance(source, Drafter):
        drafter = source
        if candidates is not None and candidates != drafter.candidates:
            raise InputError("candidates are the drafter's own; set them where it is made.")
        if (draft_window, draft_sinks) != (None, None):
            raise InputError("the window is the drafter's own; set it where it is made.")
    elif isinstance(source, nn.Module):
        drafter = drafter_of(source, **options, provenance=provenance)
    elif is_named(source):
        _refuse_block_options(str(source), *options.values(), shift_label)
        drafter = NAMED[prefix_of(source)](str(source), loaded)
    elif isinstance(source, (str, Path)):
        drafter = _loaded(source, loaded.target, options, shift_label, revision)
    else:
        raise InputError(
            f"the drafter is {type(source).__name__}; expected a name such as 'lookup', a folder, "
            "a hub id, a loaded draft model or a drafter."
        )
    if drafter.model is not None and source is not drafter:
        facts = target_facts(
            loaded.target, tokenizer or loaded.tokenizer, loaded.revision, chat_options
        )
        for check in require_fit(drafter.config, drafter.provenance, facts):
            warnings.warn(str(check), MismatchWarning, stacklevel=3)
    drafter = drafter if depth is None else drafter.with_depth(depth)
    drafter = drafter if tree is None else drafter.with_tree(tree)
    loaded.target.check_tree(drafter.nodes)
    return drafter


def drafter_of(
    model: nn.Module,
    *,
    candidates: int | None = None,
    draft_window: int | None = None,
    draft_sinks: int | None = None,
    name: str | None = None,
    provenance: Provenance | None = None,
) -> Drafter:
    """The drafter of a loaded or freshly trained model."""
    if type(model) not in DRAFTERS:
        known = ", ".join(kind.__name__ for kind in DRAFTERS)
        raise InputError(f"the drafter is {type(model).__name__}; expected one of {known}.")
    options: dict[str, Any] = {"name": name, "provenance": provenance}
    if isinstance(model, DraftModel):
        options["candidates"] = candidates
        options["window"] = check_window(
            draft_window, draft_sinks, block_size=model.config.block_size
        )
    else:
        _refuse_block_options(name or type(model).__name__, candidates, draft_window, draft_sinks)
    return DRAFTERS[type(model)](model, **options)


def is_named(source: str | Path | Any) -> bool:
    """Whether it is a drafter without files."""
    return isinstance(source, (str, Path)) and prefix_of(source) in NAMED


def is_block_drafter(source: str | Path, *, revision: str | None = None) -> bool:
    """Whether it is Domino, DFlash or Markov; one that cannot be found is an error."""
    if is_named(source):
        return False
    return locate(source, revision=revision).read_config().get(KIND_FIELD) is None


def short_name(source: str | Path) -> str:
    """A name for tables: without the machine's own folders."""
    return Path(source).resolve().name if Path(source).exists() else str(source)


def _loaded(
    source: str | Path,
    target: Target,
    options: Mapping[str, Any],
    shift_label: bool | None,
    revision: str | None,
) -> Drafter:
    found = load_drafter(
        source,
        dtype=target.dtype,
        device=target.device,
        revision=revision,
        shift_label=shift_label,
        num_target_layers=target.num_layers,
        any_kind=True,
    )
    if not isinstance(found.drafter, DraftModel):
        _refuse_block_options(str(source), *options.values(), shift_label)
    name, provenance = short_name(source), found.provenance
    return drafter_of(found.drafter, **options, name=name, provenance=provenance)


def _refuse_block_options(name: str, *given: int | None) -> None:
    if any(value is not None for value in given):
        raise InputError(
            f"{name} is no block drafter: it has no candidates, no window over its context and no "
            "alignment to choose. Leave them out."
        )


@dataclass(frozen=True, kw_only=True)
class DrafterDescription:
    """What names and files alone tell of a drafter of any kind."""

    kind: str
    config: DrafterConfig | ModuleConfig | None
    """None for a drafter without files."""
    provenance: Provenance
    dtypes: tuple[str, ...] = ()
    """The types its matrices are stored in."""
    parameters: int = 0
    drafts: int
    """In a cycle, unless another number is asked for."""

    @property
    def words(self) -> str:
        """What it is, for messages."""
        return f"this {self.kind} drafter" if self.config is None else self.config.described


def describe_fitting_drafter(
    source: str | Path,
    target: str | Path,
    *,
    revision: str | None = None,
    base: str | None = None,
    trust_remote_code: bool = False,
    draft_revision: str | None = None,
    shift_label: bool | None = None,
) -> DrafterDescription:
    """A drafter whose shape fits a target, told by files alone: before weights are loaded."""
    if is_named(source):
        return describe_drafter(source)
    facts = read_target_facts(
        target,
        revision=revision,
        base=base,
        trust_remote_code=trust_remote_code,
        shape_alone=True,
    )
    described = describe_drafter(
        source,
        revision=draft_revision,
        shift_label=shift_label,
        num_target_layers=facts.num_layers,
    )
    assert described.config is not None, "it has files"
    require_fit(described.config, described.provenance, facts)  # warnings come with the tokenizer
    return described


def describe_drafter(
    source: str | Path,
    *,
    revision: str | None = None,
    shift_label: bool | None = None,
    num_target_layers: int | None = None,
) -> DrafterDescription:
    """Check a checkpoint of any kind by its configuration and headers; `lookup` has neither."""
    if str(source) == PLAIN:
        raise InputError(f"{PLAIN!r} drafts nothing, so there is no drafter to describe.")
    if is_named(source):
        return DrafterDescription(
            kind=prefix_of(source),
            config=None,
            provenance=Provenance(),
            drafts=lookup_depth(str(source)),
        )
    found = describe(
        source,
        revision=revision,
        shift_label=shift_label,
        num_target_layers=num_target_layers,
        any_kind=True,
    )
    return DrafterDescription(
        kind=found.config.kind,
        config=found.config,
        provenance=found.provenance,
        dtypes=found.dtypes,
        parameters=found.parameters,
        drafts=found.config.default_depth,
    )
