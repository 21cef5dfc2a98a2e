"""What takes part in a head-to-head: plain decoding, and drafters of any kind.

A kind of one's own is a `Drafter` and a line in `drafters.registry.NAMED`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_spec.bench.settings import digest
from domino_spec.drafters import PLAIN, Drafter, PlainDecoding, open_drafter
from domino_spec.drafters.registry import is_block_drafter
from domino_spec.errors import InputError
from domino_spec.evaluation.continuations import weight_values
from domino_spec.targets import LoadedTarget


def open_drafters(
    sources: Sequence[str],
    loaded: LoadedTarget,
    *,
    depth: int | None = None,
    candidates: int | None = None,
    shift_label: bool | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> list[Drafter]:
    """Plain decoding and the drafter of each source, in order, each with a name of its own."""
    found: list[Drafter] = [PlainDecoding()]
    names = names_of(sources)
    blocks = [is_block_drafter(source) for source in sources]
    for name, source, is_block in zip(names, sources, blocks, strict=True):
        # Candidates and alignment are block drafters'; where there are some, theirs alone.
        told = is_block or not any(blocks)
        drafter = open_drafter(
            source,
            loaded,
            depth=depth,
            candidates=candidates if told else None,
            shift_label=shift_label if told else None,
            chat_options=chat_options or {},
        )
        drafter = copy.copy(drafter)
        drafter.name = name
        found.append(drafter)
    return found


def recorded(drafter: Drafter) -> dict[str, Any]:
    """A drafter as plain values; the fingerprint changes whenever its drafts could."""
    facts: list[Any] = [drafter.kind, drafter.config and drafter.config.to_dict()]
    if drafter.model is not None:
        facts.append(weight_values(drafter.model))
    settings = {"depth": drafter.depth, "candidates": drafter.candidates}
    return {
        "name": drafter.name,
        "kind": drafter.kind,
        "fingerprint": digest(facts) if drafter.drafts else PLAIN,
        "settings": settings if drafter.drafts else {},
        "nbytes": drafter.weight_bytes,
    }


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
