from __future__ import annotations

from pathlib import Path

import pytest

from .helpers import Raw, raw_public, raw_speculators, tiny_drafter


@pytest.fixture
def domino(tmp_path: Path) -> Raw:
    """A tiny public Domino checkpoint."""
    return raw_public(tiny_drafter(), tmp_path / "made")


@pytest.fixture
def dflash(tmp_path: Path) -> Raw:
    """A tiny public DFlash checkpoint."""
    return raw_public(tiny_drafter(head=None, shift_label=False), tmp_path / "made")


@pytest.fixture
def speculators(tmp_path: Path) -> Raw:
    """A tiny speculators Domino checkpoint."""
    return raw_speculators(tiny_drafter(), tmp_path / "made")
