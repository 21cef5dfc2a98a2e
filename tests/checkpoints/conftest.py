from __future__ import annotations

from pathlib import Path

import pytest

from .helpers import Raw, raw_public, tiny_drafter


@pytest.fixture
def domino(tmp_path: Path) -> Raw:
    """A tiny public Domino checkpoint."""
    return raw_public(tiny_drafter(), tmp_path / "made")
