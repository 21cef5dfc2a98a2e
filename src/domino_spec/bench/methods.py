"""What takes part in a head-to-head: plain decoding, and whatever can propose drafts.

A drafter of any kind we know is opened by `baselines.registry`; a kind of one's own is one line of
`MAKERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from domino_spec.baselines import PLAIN, NamedProposer, open_drafter
from domino_spec.baselines.registry import is_baseline_source
from domino_spec.bench.settings import digest
from domino_spec.decoding import NoDrafts, Proposer
from domino_spec.engine.sources import AnySource
from domino_spec.errors import InputError
from domino_spec.evaluation.continuations import weight_values
from domino_spec.targets import LoadedTarget


@dataclass(frozen=True, kw_only=True)
class Method:
    """A name in the tables, and how its source of drafts is made."""

    name: str
    kind: str
    make: Callable[[], Proposer]
    """Called once; every run of it begins anew with `Proposer.begin`."""
    fingerprint: str
    """Changes whenever the drafts could: a run is not continued with another one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: AnySource | None = None
    """What the engine runs; None where only the reference loop can."""
    nbytes: int = 0
    """Weights it brings along."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing drafts: what the others are held against."""
        return self.kind == PLAIN

    @property
    def fits_engine(self) -> bool:
        """Whether the engine can run it."""
        return self.is_plain or self.source is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "name": self.name,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings),
            "nbytes": self.nbytes,
        }


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """How much every drafter drafts."""

    depth: int | None = None
    candidates: int | None = None
    shift_label: bool | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)


def plain() -> Method:
    """Plain decoding: one forward a token and nothing else."""
    return Method(name=PLAIN, kind=PLAIN, make=NoDrafts, fingerprint=PLAIN)


Maker = Callable[[str, str, LoadedTarget, DraftSettings], Method]
"""From the name it is to have, what follows the prefix, the target and the settings."""

MAKERS: dict[str, Maker] = {}
"""Kinds of one's own, by the prefix of their source: `--draft mine:3`."""


def make_methods(
    sources: Sequence[str], loaded: LoadedTarget, settings: DraftSettings
) -> list[Method]:
    """Plain decoding and a method for each source, in order."""
    found, names = [plain()], names_of(sources)
    known = [source for source in sources if source.partition(":")[0] not in MAKERS]
    blocks_too = not all(is_baseline_source(source) for source in known)
    for name, source in zip(names, sources, strict=True):
        prefix, _, rest = source.partition(":")
        if prefix in MAKERS:
            found.append(MAKERS[prefix](name, rest, loaded, settings))
            continue
        # Candidates and alignment are block drafters'; beside others they are theirs alone.
        is_block = not (blocks_too and is_baseline_source(source))
        opened = open_drafter(
            source,
            loaded,
            depth=settings.depth,
            candidates=settings.candidates if is_block else None,
            shift_label=settings.shift_label if is_block else None,
            chat_options=settings.chat_options,
        )
        found.append(method_of(opened, name=name))
    return found


def method_of(opened: NamedProposer, *, name: str) -> Method:
    """Any source of drafts as a method."""
    drafter = opened.drafter
    facts: list[Any] = [opened.kind, opened.config and opened.config.to_dict()]
    return Method(
        name=name,
        kind=opened.kind,
        make=opened.make,
        fingerprint=digest(facts if drafter is None else [*facts, weight_values(drafter)]),
        settings={"depth": opened.depth, "candidates": opened.candidates},
        source=opened.source,
        nbytes=0 if drafter is None else bytes_of(drafter),
    )


def names_of(sources: Sequence[str]) -> list[str]:
    """Short names without the machine's own paths; as long as it takes to tell them apart."""
    repeated = {source for source in sources if list(sources).count(source) > 1}
    if repeated:
        raise InputError(f"the drafter {sorted(repeated)[0]} is given twice; give it once.")
    for parts in range(1, 5):
        names = [_short(source, parts) for source in sources]
        if len({PLAIN, *names}) == len(names) + 1:
            return names
    return [f"{_short(source, 1)} ({i})" for i, source in enumerate(sources, start=1)]


def _short(source: str, parts: int) -> str:
    if not Path(source).exists():
        return source.removeprefix("released:")
    return "/".join(Path(source).resolve().parts[-parts:])


def bytes_of(module: nn.Module) -> int:
    """Of all weights."""
    return sum(weight.nbytes for weight in module.parameters())
