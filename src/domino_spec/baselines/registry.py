"""Any source of drafts by its name or path, ready to be measured beside the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from domino_spec.api import DominoDecoder, MismatchWarning, target_facts
from domino_spec.baselines.config import BaselineConfig
from domino_spec.baselines.eagle3 import Eagle3
from domino_spec.baselines.eagle3_proposer import Eagle3Proposer
from domino_spec.baselines.files import AnyBaseline, is_baseline, load_baseline
from domino_spec.baselines.lean import BaselineSource
from domino_spec.baselines.lean_lookup import LookupSource
from domino_spec.baselines.lookup import DEFAULT_DEPTH, PromptLookup
from domino_spec.baselines.medusa import Medusa, MedusaProposer
from domino_spec.checkpoints import Provenance, require_fit
from domino_spec.checkpoints.files import locate
from domino_spec.decoding import NoDrafts, Proposer
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.engine.sources import AnySource
from domino_spec.errors import InputError
from domino_spec.targets import LoadedTarget, Target

PLAIN = "plain"
LOOKUP = "lookup"


@dataclass(frozen=True, kw_only=True)
class NamedProposer:
    """A source of drafts for one target, and what it is."""

    name: str
    """As it was asked for, without the machine's own folders."""
    kind: str
    """`plain`, `lookup`, `domino`, `dflash`, `markov`, `medusa` or `eagle3`."""
    make: Callable[[], Proposer]
    """A fresh proposer for one run."""
    depth: int
    candidates: int | None = None
    """Base candidates that a block drafter's head chooses among; None means all."""
    config: DrafterConfig | BaselineConfig | None = None
    drafter: nn.Module | None = None
    source: AnySource | None = None
    """What an engine drafts with; None for plain decoding."""
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def parameters(self) -> int:
        """How many numbers it has learnt."""
        return 0 if self.drafter is None else sum(p.numel() for p in self.drafter.parameters())

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        config = None if self.config is None else self.config.to_dict()
        return {
            "name": self.name,
            "kind": self.kind,
            "depth": self.depth,
            "parameters": self.parameters,
            "config": config,
        }


def open_drafter(
    spec: str | Path,
    target: Target | LoadedTarget,
    tokenizer: Any | None = None,
    *,
    depth: int | None = None,
    candidates: int | None = None,
    shift_label: bool | None = None,
    revision: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> NamedProposer:
    """Find out what `spec` names and load it where the target is, in the target's type.

    `plain` drafts nothing; `lookup` or `lookup:DEPTH` looks the text up; anything else is a
    checkpoint of any kind: a folder, a file, a hub id or `released:NAME`.
    """
    named = str(spec)
    loaded_target = target if isinstance(target, LoadedTarget) else LoadedTarget.of(target)
    tokenizer = loaded_target.tokenizer if tokenizer is None else tokenizer
    if named == PLAIN:
        return NamedProposer(name=named, kind=PLAIN, make=NoDrafts, depth=0)
    if is_lookup(named):
        drafts = lookup_depth(named) if depth is None else depth
        return NamedProposer(
            name=named,
            kind=LOOKUP,
            make=lambda: PromptLookup(depth=drafts),
            depth=drafts,
            source=LookupSource(depth=drafts),
        )
    if not is_baseline_source(spec, revision=revision):
        return _block_drafter(
            spec, loaded_target, tokenizer, depth=depth, candidates=candidates,
            shift_label=shift_label, revision=revision, chat_options=chat_options,
        )  # fmt: skip
    if candidates is not None or shift_label is not None:
        raise InputError(
            f"{named} is no block drafter: it has no candidates and no alignment to choose. "
            "Leave both out."
        )
    target = loaded_target.target
    loaded = load_baseline(spec, revision=revision, dtype=target.dtype, device=target.device)
    facts = target_facts(target, tokenizer, loaded_target.revision, chat_options)
    for check in require_fit(loaded.config, loaded.provenance, facts):
        warnings.warn(str(check), MismatchWarning, stacklevel=2)
    return named_baseline(
        short_name(spec), loaded.drafter, target, depth=depth, provenance=loaded.provenance
    )


def named_baseline(
    name: str,
    drafter: AnyBaseline,
    target: Target,
    *,
    depth: int | None = None,
    provenance: Provenance | None = None,
) -> NamedProposer:
    """A loaded or freshly trained baseline."""
    config: BaselineConfig = drafter.config
    drafts = config.default_depth if depth is None else depth
    if drafts < 1 or (config.most_drafts is not None and drafts > config.most_drafts):
        most = "or more" if config.most_drafts is None else f"to {config.most_drafts}"
        raise InputError(f"depth is {drafts}; this {config.kind} drafter gives 1 {most} drafts.")
    return NamedProposer(
        name=name,
        kind=config.kind,
        make=lambda: baseline_proposer(drafter, target, depth=drafts),
        depth=drafts,
        config=config,
        drafter=drafter,
        source=BaselineSource(drafter),
        provenance=provenance or Provenance(),
    )


def baseline_proposer(drafter: AnyBaseline, target: Target, *, depth: int) -> Proposer:
    """The proposer of a baseline's kind."""
    if isinstance(drafter, Medusa):
        return MedusaProposer(drafter, target, depth=depth)
    assert isinstance(drafter, Eagle3)
    return Eagle3Proposer(drafter, target, depth=depth)


def block_kind(config: DrafterConfig) -> str:
    """The kind of a block drafter: that of its head."""
    return "dflash" if config.head is None else config.head.kind


def is_baseline_source(spec: str | Path, *, revision: str | None = None) -> bool:
    """Whether `spec` is no block drafter; one that cannot be found is an error."""
    if str(spec) == PLAIN or is_lookup(str(spec)):
        return True
    return is_baseline(locate(spec, revision=revision).read_config())


def is_lookup(spec: str) -> bool:
    """Whether it is `lookup` or `lookup:DEPTH`."""
    return spec.partition(":")[0] == LOOKUP


def lookup_depth(spec: str) -> int:
    """The drafts of `lookup` or `lookup:DEPTH`."""
    _, colon, stated = spec.partition(":")
    if not colon:
        return DEFAULT_DEPTH
    if not stated.isdecimal() or int(stated) < 1:
        raise InputError(f"{spec!r} asks for {stated!r} drafts; expected lookup:DEPTH, 1 or more.")
    return int(stated)


def short_name(spec: str | Path) -> str:
    """A name for tables: without the machine's own folders."""
    return Path(spec).resolve().name if Path(spec).exists() else str(spec)


def _block_drafter(
    spec: str | Path,
    target: LoadedTarget,
    tokenizer: Any | None,
    *,
    depth: int | None,
    candidates: int | None,
    shift_label: bool | None,
    revision: str | None,
    chat_options: Mapping[str, Any] | None,
) -> NamedProposer:
    decoder = DominoDecoder.from_pretrained(
        target,
        spec,
        tokenizer=tokenizer,
        draft_revision=revision,
        shift_label=shift_label,
        depth=depth,
        candidates=candidates,
        chat_options=chat_options,
    )
    drafter = decoder.drafter
    assert isinstance(drafter, Drafter)
    return NamedProposer(
        name=short_name(spec),
        kind=block_kind(drafter.config),
        make=decoder.proposer,
        depth=decoder.depth,
        candidates=decoder.candidates,
        config=drafter.config,
        drafter=drafter,
        source=drafter,
        provenance=decoder.provenance,
    )
