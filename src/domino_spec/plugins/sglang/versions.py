"""Which SGLang releases the plugin is made for."""

from __future__ import annotations

import re

SUPPORTED = ((0, 5, 20), (0, 5, 23))
"""The first release with a Domino rollout, and the last one that was read."""


def number(version: str) -> tuple[int, ...] | None:
    """The leading three numbers of a version; None for a build without them."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return None if found is None else tuple(map(int, found.groups()))


def is_too_old(version: str) -> bool:
    """Whether this release cannot roll a Domino head out at all."""
    found = number(version)
    return found is not None and found != (0, 0, 0) and found < SUPPORTED[0]


def problem(version: str) -> str | None:
    """What is wrong with a version, or None."""
    found = number(version)
    if found is None or found == (0, 0, 0) or SUPPORTED[0] <= found <= SUPPORTED[1]:
        return None
    first, last = (".".join(map(str, end)) for end in SUPPORTED)
    if is_too_old(version):
        return (
            f"this is SGLang {version}, which cannot serve Domino drafters; expected {first} or "
            f"later ({last} is the last one tried). Upgrade SGLang."
        )
    return (
        f"this is SGLang {version}; domino-spec was tried with {first} to {last}. If drafts are "
        "not accepted, install one of these."
    )
