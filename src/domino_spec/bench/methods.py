"""What takes part in a head-to-head: plain decoding, and whatever can propose drafts.

A new kind of drafter is one line of `MAKERS`: its prefix, and a function that makes a `Method` of
what follows it (`--draft medusa:PATH`). What has no known prefix is a Domino, DFlash or Markov
drafter of the ordinary loader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from domino_spec.api import DominoDecoder
from domino_spec.bench.settings import digest
from domino_spec.decoding import NoDrafts, Proposer
from domino_spec.drafter import Drafter
from domino_spec.errors import InputError
from domino_spec.evaluation.continuations import weight_values
from domino_spec.targets import LoadedTarget

PLAIN = "plain"
_DFLASH = "dflash"


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
    drafter: Drafter | None = None
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
        return self.is_plain or self.drafter is not None

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


Maker = Callable[[str, str, LoadedTarget, DraftSettings], Method]
"""From the name it is to have, what follows the prefix, the target and the settings."""


def plain() -> Method:
    """Plain decoding: one forward a token and nothing else."""
    return Method(name=PLAIN, kind=PLAIN, make=NoDrafts, fingerprint=PLAIN)


def block_drafter(name: str, source: str, loaded: LoadedTarget, settings: DraftSettings) -> Method:
    """A Domino, DFlash or Markov drafter: a folder, a file, a hub id or released:NAME."""
    decoder = DominoDecoder.from_pretrained(
        loaded,
        source,
        depth=settings.depth,
        candidates=settings.candidates,
        shift_label=settings.shift_label,
        chat_options=settings.chat_options,
    )
    drafter = decoder.drafter
    assert drafter is not None
    head = drafter.config.head
    used = {"depth": decoder.depth, "candidates": decoder.candidates}
    return Method(
        name=name,
        kind=_DFLASH if head is None else head.kind,
        make=decoder.proposer,
        fingerprint=digest([drafter.config.to_dict(), weight_values(drafter)]),
        settings=used,
        drafter=drafter,
        nbytes=bytes_of(drafter),
    )


MAKERS: dict[str, Maker] = {}
"""Kinds of drafters beside the ordinary ones, by the prefix of their source."""


def make_methods(
    sources: Sequence[str], loaded: LoadedTarget, settings: DraftSettings
) -> list[Method]:
    """Plain decoding and a method for each source, in order."""
    methods = [plain()]
    for name, source in zip(names_of(sources), sources, strict=True):
        prefix, _, rest = source.partition(":")
        maker = MAKERS.get(prefix)
        if maker is None:
            methods.append(block_drafter(name, source, loaded, settings))
        else:
            methods.append(maker(name, rest, loaded, settings))
    return methods


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
