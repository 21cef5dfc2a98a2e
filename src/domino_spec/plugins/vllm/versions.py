"""Which vLLM releases the plugin is made for."""

from __future__ import annotations

import re

SUPPORTED = ((0, 26), (0, 32))
"""The first and the last minor version (which of them ran where: docs/serving.md)."""


def problem(version: str) -> str | None:
    """What is wrong with a version, or None. Builds without a number (0.0.dev) are let through."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or found.groups() == ("0", "0"):
        return None
    number = (int(found[1]), int(found[2]))
    first, last = SUPPORTED
    if first <= number <= last:
        return None
    span = " to ".join(".".join(map(str, end)) for end in (first, last))
    return (
        f"this is vLLM {version}; domino-spec serves Domino drafters on vLLM {span}. Install one "
        "of these (`pip install 'domino-spec[vllm]'`), or serve without --speculative-config."
    )
